"""Guards keep what a scan found out of training: records are left out, capped, masked or projected
away. A guard is a class with the methods of `guards.Guard` that it needs, and an entry in
`guards.GUARDS`."""
