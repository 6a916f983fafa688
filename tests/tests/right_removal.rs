//! Least rights: each right of Nestor's programs is removed. The API server refuses exactly that verb and resource to the program,
//! which says so; what the right is for succeeds when the right is back. The tests run one at a time: they replace programs of the
//! lab by programs with accounts of their own.

mod gc_csi;
mod guest;
mod mgmt_csi;
mod others;
mod shim;
pub(crate) mod table;
