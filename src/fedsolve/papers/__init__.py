"""The figures and tables of the papers: a catalogue, how to reproduce them, result pages."""
