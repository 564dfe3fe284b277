"""Assume and discharge: experts blocks whose Python asks for data, made one graph without a word from the user."""
