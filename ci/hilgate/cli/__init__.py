"""The command line: thin edges around the stages. Commands import what they need when they run."""
