//! Nothing irreversible is done to a volume while a virtual machine may have it, running or saved.
