//! Promised space is there, and a failed request holds none of it.
