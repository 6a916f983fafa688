//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::time::Duration;

use infra_api::MAX_WAIT_SECONDS;

use crate::api::extract::wait;
use crate::backup::file::{name_at, time_of};
use crate::cli::size;
use crate::engine::Record;

pub use crate::hypervisor::libvirt::fuzzing::domain_xml;

/// Records beside the bytes of volumes, which anyone who can write to a pool can change: what can be decoded is the same after
/// encoding.
pub fn records(data: &[u8]) {
    let Ok(record) = Record::decode(data) else { return };
    let encoded = record.encode().expect("what was decoded can be encoded");
    assert_eq!(Record::decode(&encoded).as_ref(), Ok(&record));
}

/// Texts of the command line, of headers and of file names: sizes, `Prefer`, names of backups.
pub fn infra_texts(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(bytes) = size::parse(&text)
        && let Ok(shown) = size::parse(&size::show(bytes))
    {
        assert_eq!(shown, bytes, "{text}");
    }
    assert!(wait(&text).is_none_or(|time| time <= Duration::from_secs(MAX_WAIT_SECONDS)));
    if let Some(time) = time_of("catalog-", &text) {
        assert_eq!(name_at("catalog-", time), text);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn domain_xml() {
        fuzz_kit::replay("domain_xml", super::domain_xml);
    }

    #[test]
    fn records() {
        fuzz_kit::replay("records", super::records);
    }

    #[test]
    fn infra_texts() {
        fuzz_kit::replay("infra_texts", super::infra_texts);
    }
}
