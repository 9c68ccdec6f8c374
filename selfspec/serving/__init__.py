"""An OpenAI-compatible server over one `LLM`; needs the extra `serve`. `app.create_app` makes its application."""
