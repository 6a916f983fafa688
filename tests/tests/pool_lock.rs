//! A pool is served by one storage-infra at a time.
