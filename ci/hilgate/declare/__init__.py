"""What is declared in ci/ and what imports what: read and checked."""
