//! Definition of reasons: the CamelCase words in conditions, events, errors and annotations.

/// Defines an enum of reasons. Each variant's name is its text.
#[macro_export]
macro_rules! reasons {
    ($(#[$attribute:meta])* $visibility:vis enum $name:ident {
        $($(#[doc = $doc:literal])* $variant:ident,)+
    }) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $visibility enum $name {
            $($(#[doc = $doc])* $variant,)+
        }

        impl $name {
            /// All reasons with their documentation.
            #[allow(dead_code, reason = "for the generated reference of some")]
            $visibility const ALL: &'static [(Self, &'static str)] =
                &[$((Self::$variant, concat!($($doc),*)),)+];

            /// The reason as text.
            $visibility fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
