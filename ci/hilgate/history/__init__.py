"""The history: a folder of judged builds, and what is asked of it."""
