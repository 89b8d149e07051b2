"""Find pictures that are dispersed in a data set: scan pictures and captions for elements that recur at one place under
one phrase, keep what was found out of training, and ask a model for it. docs/shield.md explains method and limits.
Recovery of a known target is measured in `silentbad.recovery`."""
