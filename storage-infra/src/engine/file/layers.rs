//! Layers over the file of a volume that somebody made beside it, as an external snapshot of a VM does. What the VM wrote since is
//! in the layer, also where the server did not see it: it was down, or the VM was gone before it looked.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{FileEngine, MARKER, io_error, object_of, part_of};
use crate::engine::{EngineError, Object, Result, qcow2};
use crate::safety::Check;

/// Part of the names of files that an operator did not choose. A guest wrote them, so their content is no evidence.
pub(crate) const NOT_CHOSEN: &str = ".not-chosen.";

impl FileEngine {
    /// Fails if an image in the pool is a layer over the file of a volume and has later writes.
    pub(super) fn refuse_layers(&self, object: &Object) -> Result<()> {
        let Object::Volume(id) = object else { return Ok(()) };
        if !Check::Layers.applies() {
            return Ok(());
        }
        let path = self.file(object);
        let base = match fs::metadata(&path) {
            Ok(base) => base,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io_error("read the metadata of", &path)(error)),
        };
        for entry in self.names()? {
            let name = entry.file_name();
            let is_image = name.to_str().is_none_or(is_image);
            if is_image && is_later_layer(&entry.path(), &path, &base) {
                return Err(EngineError::InUse(told(&entry.path(), id.as_str())));
            }
        }
        Ok(())
    }
}

fn told(layer: &Path, id: &str) -> String {
    format!(
        "{0} is a layer over the file of volume {id}, as after an external snapshot, and was written later: what a VM wrote since may \
         be only there. Merge it with `qemu-img commit {0}` while no VM has it open, then remove it. If its writes are not wanted, or \
         are merged already, move it out of the pool",
        layer.display()
    )
}

/// Whether a file of this name may be an image of others.
fn is_image(name: &str) -> bool {
    name != MARKER && !name.contains(NOT_CHOSEN) && object_of(name).is_none() && part_of(name).is_none()
}

/// Whether an image is a layer over a file and has later writes. One that is removed meanwhile, or cannot be read, is none.
fn is_later_layer(image: &Path, file: &Path, base: &Metadata) -> bool {
    let Ok(found) = fs::symlink_metadata(image) else { return false };
    let time = |meta: &Metadata| (meta.mtime(), meta.mtime_nsec());
    found.is_file() && time(&found) >= time(base) && {
        let backing = File::open(image).and_then(|image| qcow2::backing_of(&image));
        backing.ok().flatten().is_some_and(|backing| is_same(image, &backing, file, base))
    }
}

/// Whether the name of a backing file stands for this file.
fn is_same(image: &Path, backing: &str, file: &Path, base: &Metadata) -> bool {
    // A description in JSON names the file in one of several fields.
    if backing.starts_with("json:") {
        return file.file_name().is_some_and(|name| backing.contains(&*name.to_string_lossy()));
    }
    let backing = PathBuf::from(backing.strip_prefix("file:").unwrap_or(backing));
    // A relative name is relative to the image.
    let path = image.parent().unwrap_or(Path::new("/")).join(backing);
    fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (base.dev(), base.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::Command;
    use std::time::{Duration, SystemTime};

    use infra_api::VolumeId;
    use uuid::Uuid;

    use super::*;

    fn qemu_img(dir: &Path, arguments: &[&str]) {
        let output = Command::new("qemu-img").args(arguments).current_dir(dir).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    #[test]
    fn a_volume_under_a_later_layer_is_not_used_until_the_layer_is_merged_or_moved_away() {
        let dir = tempfile::tempdir().unwrap();
        let pool = dir.path().join("pool");
        fs::create_dir(&pool).unwrap();
        let engine = FileEngine::new(&pool, Uuid::new_v4(), &dir.path().join("data"));
        let objects = ["v", "w"].map(|id| Object::Volume(VolumeId::new(id).unwrap()));
        let [v, w] = &objects;
        for object in &objects {
            File::create(engine.file(object)).unwrap().set_len(1 << 20).unwrap();
        }
        let layer = pool.join("v.backup");
        let json = r#"json:{"driver":"raw","file":{"driver":"file","filename":"v.raw"}}"#;
        let absolute = pool.join("v.raw").display().to_string();
        for backing in ["v.raw", &absolute, json] {
            let create = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing, "v.backup", "1M"];
            qemu_img(&pool, &create);
            let refused = engine.refuse_layers(v).unwrap_err().to_string();
            assert!(refused.contains("v.backup is a layer over the file of volume v"), "{refused}");
            assert!(engine.refuse_layers(w).is_ok());
            fs::rename(&layer, dir.path().join("v.backup")).unwrap();
            engine.refuse_layers(v).unwrap();
        }
        // A layer that was merged, and the volume was written since.
        fs::rename(dir.path().join("v.backup"), &layer).unwrap();
        File::options().write(true).open(engine.file(v)).unwrap().write_all_at(b"later", 0).unwrap();
        let earlier = SystemTime::now() - Duration::from_secs(60);
        File::options().write(true).open(&layer).unwrap().set_modified(earlier).unwrap();
        engine.refuse_layers(v).unwrap();
    }

    #[test]
    fn what_a_guest_wrote_is_no_layer() {
        let dir = tempfile::tempdir().unwrap();
        let pool = dir.path().join("pool");
        fs::create_dir(&pool).unwrap();
        let engine = FileEngine::new(&pool, Uuid::new_v4(), &dir.path().join("data"));
        let v = Object::Volume(VolumeId::new("v").unwrap());
        File::create(engine.file(&v)).unwrap().set_len(1 << 20).unwrap();
        for name in ["w.raw", "w.snap", "w.vpart", "w.spart-7", "w.not-chosen.img", "w.not-chosen.2.img"] {
            qemu_img(&pool, &["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "v.raw", name, "1M"]);
            engine.refuse_layers(&v).unwrap();
            fs::remove_file(pool.join(name)).unwrap();
        }
    }
}
