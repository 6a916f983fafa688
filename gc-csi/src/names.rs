//! Names that must not be confused, as types. Text becomes a name where a request or an object's metadata is read, and
//! a name becomes text where a request or a message is written.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub(crate) struct $name(String);

        impl $name {
            /// The name with this text.
            pub(crate) fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// Its text.
            pub(crate) fn as_str(&self) -> &str {
                &self.0
            }
        }

        /// As the text, so that messages show no type.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        /// For functions that accept any text.
        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                self.as_str()
            }
        }

        // For lookups in maps.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }
    };
}

name! {
    /// Name of a management claim, which is also the handle of a guest volume.
    ClaimName
}

name! {
    /// Name of a VirtualMachine, which is also the name of its guest Node.
    VmName
}

name! {
    /// Name that a sidecar gives a volume or snapshot when it requests its creation, and the name of the guest object.
    CsiName
}

impl ClaimName {
    /// Name of the claim's entry in `VirtualMachine.spec.volumes`.
    pub(crate) fn entry(&self) -> String {
        crds::names::volume_entry(&self.0)
    }
}
