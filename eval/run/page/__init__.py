"""A report as sections of paragraphs, lists, tables and figures, and its two forms: Markdown and one file of HTML."""
