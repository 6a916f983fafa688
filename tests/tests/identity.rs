//! A guest PersistentVolume stays with its bytes, whatever takes the name of its management claim.
