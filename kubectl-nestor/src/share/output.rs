//! What `share` prints.

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::cli::Format;
use crate::error::Error;
use crate::render::{format, manifest, print};

/// Prints what was done and the guest's PersistentVolume; as data only the latter.
pub(super) fn show(output: Format, head: &str, volume: &PersistentVolume) -> Result<(), Error> {
    let yaml = manifest(Format::Yaml, volume)?;
    let text = |_| {
        format!(
            "{head}Next, in the guest: create this PersistentVolume, and a PersistentVolumeClaim with its name in \
             spec.volumeName.\n---\n{yaml}"
        )
    };
    print(&format(output, volume, text)?)
}
