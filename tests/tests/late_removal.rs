//! A removal takes out only the volume entry that it was meant for.
