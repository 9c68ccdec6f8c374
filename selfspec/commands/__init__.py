"""What the commands do; `cli.py` only reads their options. Nothing here imports torch before a model is asked for."""
