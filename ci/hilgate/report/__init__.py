"""What a person reads of a verdict: HTML, annotation, terminal, JUnit, tables, history."""
