"""Other libraries. Each module needs the package that it is for, and is imported only by those who use it."""
