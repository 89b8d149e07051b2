"""Records and targets: read from disk, checked, kept in a memory-mapped table, drawn at an address,
collated.

The order in which elements are shown lives here (`elements`), and what a record looks like at a
draw (`draws`). How often an element should be shown, and what is rehearsed, is decided in
`silentbad.memory`. No model here."""
