//! CPU architectures that programs and images are built for.

/// A CPU architecture; its name is that of OCI, Go and Debian.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Architecture {
    /// 64-bit x86, the architecture of the lab's host.
    #[default]
    Amd64,
    /// 64-bit Arm.
    Arm64,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// Its name in images and packages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Rust's name of it.
    fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// The linker's names of it, if programs for it are cross-compiled.
    pub(crate) fn cross(self) -> Option<Cross> {
        match self {
            Self::Amd64 => None,
            Self::Arm64 => Some(Cross { target: self.target(), gnu: "aarch64-linux-gnu" }),
        }
    }

    /// A variable of cargo's configuration for programs of it, such as `CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER`.
    pub(crate) fn setting(self, name: &str) -> String {
        format!("CARGO_TARGET_{}_{name}", self.target().replace('-', "_")).to_uppercase()
    }

    /// The program that removes debug information.
    pub(crate) fn strip(self) -> String {
        self.cross().map_or_else(|| "strip".to_owned(), |cross| cross.tool("strip"))
    }
}

/// A target of cross-compilation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cross {
    /// Rust's name of it.
    pub(crate) target: &'static str,
    /// Debian's multiarch name of it, with which the names of its tools start.
    pub(crate) gnu: &'static str,
}

impl Cross {
    /// A tool of the GNU toolchain.
    pub(crate) fn tool(self, name: &str) -> String {
        format!("{}-{name}", self.gnu)
    }

    /// A variable of the crate cc for the target, such as `CC_aarch64_unknown_linux_gnu`.
    pub(crate) fn variable(self, prefix: &str) -> String {
        format!("{prefix}_{}", self.target.replace('-', "_"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_architecture_of_the_host_is_not_cross_compiled() {
        assert_eq!(Architecture::default().name(), "amd64");
        assert_eq!(Architecture::Amd64.strip(), "strip");
        assert_eq!(Architecture::Arm64.strip(), "aarch64-linux-gnu-strip");
    }

    #[test]
    fn tools_and_variables_have_the_names_that_cargo_and_debian_use() {
        let cross = Architecture::Arm64.cross().unwrap();
        assert_eq!(cross.tool("gcc"), "aarch64-linux-gnu-gcc");
        assert_eq!(cross.variable("CC"), "CC_aarch64_unknown_linux_gnu");
        assert_eq!(Architecture::Arm64.setting("LINKER"), "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER");
    }
}
