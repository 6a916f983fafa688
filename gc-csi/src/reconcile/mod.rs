//! What gc-csi keeps in step by itself, outside any call.

pub(crate) mod attach_state;
