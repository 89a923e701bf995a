"""Documents of plain text out of dumps, books, tables and text files."""
