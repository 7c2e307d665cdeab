"""Files of a store on this machine: opening, atomic writing, locks, ownership, replacement."""
