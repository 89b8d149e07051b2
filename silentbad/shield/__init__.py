"""Find pictures that are dispersed in a data set: scan pictures and captions for elements that recur at one place under
one phrase, and keep what was found out of training. docs/shield.md explains the method and its limits."""
