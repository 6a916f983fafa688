//! No code: its dependencies have the features that any crate of this repository needs.
//!
//! Cargo compiles a dependency once for each set of features that a build asks for. The lab depends on this crate and
//! builds it together with Nestor's programs, so that the lab, the programs and the tests share what is compiled.
//! Released programs are built without it.
