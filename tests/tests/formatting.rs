//! When a disk is formatted: only when the storage infra attests that it is blank.
