//! Archive: files in memory, written as .tar.gz.

use std::collections::BTreeMap;
use std::io;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Files by path.
#[derive(Debug, Default)]
pub struct Archive(BTreeMap<String, Vec<u8>>);

impl Archive {
    /// Adds a file.
    pub fn add(&mut self, path: &str, content: Vec<u8>) {
        self.0.insert(path.to_owned(), content);
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// One line per file with its size.
    pub fn listing(&self) -> String {
        self.0.iter().map(|(path, content)| format!("{:>9}  {path}\n", content.len())).collect()
    }

    /// The archive as bytes, below one folder.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for (path, content) in &self.0 {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o600);
            tar.append_data(&mut header, format!("nestor-bundle/{path}"), content.as_slice())?;
        }
        tar.into_inner()?.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_archive_can_be_unpacked() {
        let mut archive = Archive::default();
        archive.add("guest/a.json", b"[]".to_vec());
        assert!(archive.listing().contains("2  guest/a.json"));
        let encoded = archive.encode().unwrap();
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(encoded.as_slice()));
        let mut entry = tar.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(entry.path().unwrap().to_str(), Some("nestor-bundle/guest/a.json"));
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        assert_eq!(text, "[]");
    }
}
