"""Speed on a CPU, in one command: what the pieces of a round cost, and whole outputs beside other decoders."""
