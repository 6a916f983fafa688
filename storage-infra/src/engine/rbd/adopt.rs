//! Images of others that become volumes, and volumes that become images of others again. An image is renamed, and never
//! copied.

use std::path::Path;

use super::RbdEngine;
use super::location::parse_image;
use super::output::Examined;
use crate::audit;
use crate::engine::adopt::ForeignImage;
use crate::engine::{Clearance, EngineError, Object, Record, Result};
use crate::fail_points::requested;
use crate::hypervisor::RbdImage;

fn refused<T>(image: &RbdImage, why: impl std::fmt::Display) -> Result<T> {
    Err(EngineError::Unsuitable(format!("the image {image} cannot become a volume: {why}")))
}

impl RbdEngine {
    /// The image that a path names, which must be where the pool's volumes are.
    fn here(&self, path: &Path) -> Result<RbdImage> {
        let image = parse_image(path).map_err(EngineError::Unsuitable)?;
        match self.ceph.location.name_of(&image) {
            Some(_) => Ok(image),
            None => Err(EngineError::Unsuitable(format!(
                "the image {image} is not in {}, where the volumes of the pool are: an image is never copied or moved between \
                 Ceph pools and namespaces",
                self.ceph.location.place()
            ))),
        }
    }

    pub(super) fn examine(&self, path: &Path) -> Result<ForeignImage> {
        self.check()?;
        let image = self.here(path)?;
        if self.ceph.has_record(&image)? {
            return refused(
                &image,
                "it has the record of a volume, a snapshot or a pool of a storage-infra server; if that server's catalog was \
                 lost, `storage-infra recover` rebuilds it",
            );
        }
        let found = self.suitable(&image)?;
        Ok(ForeignImage { id: found.number(), size: found.bytes, allocated: self.ceph.allocated(&image)? })
    }

    /// Fails if an image cannot become a volume, or is in use.
    fn suitable(&self, image: &RbdImage) -> Result<Examined> {
        let Some(found) = self.ceph.examine(image)? else {
            return Err(EngineError::Unsuitable(format!("the image {image} does not exist")));
        };
        if let Some(why) = found.refusal() {
            return refused(image, why);
        }
        match self.watched_by(image)? {
            None => Ok(found),
            Some(holder) => {
                Err(EngineError::InUse(format!("the image {image} is in use by {holder}; stop that first")))
            }
        }
    }

    /// The image keeps its name until it has the record, and then gets that of the volume at once.
    pub(super) fn adopt(&self, cleared: &Clearance, path: &Path, id: u64, record: &Record) -> Result<()> {
        self.check()?;
        let (object, from, to) = (cleared.object(), self.here(path)?, self.image(cleared.object()));
        self.refuse_another(object, cleared.identity())?;
        if self.is_at(&to, id)? {
            return Ok(());
        }
        let named = || {
            if self.suitable(&from)?.number() != id {
                return refused(&from, "it was replaced meanwhile");
            }
            self.ceph.set_record(&from, record)?;
            let named = || self.rename_to(&from, &to);
            fail_point::effect(|| Some("engine.rbd.adopt".into()), requested, named)
        };
        if let Err(error) = named() {
            self.forget(&from, record)?;
            return Err(error);
        }
        audit::log_action("adopt", object, path, "it becomes the image of the volume");
        Ok(())
    }

    /// Removes the record of an object from an image that does not become its image, if an attempt has written it.
    fn forget(&self, image: &RbdImage, record: &Record) -> Result<()> {
        match self.ceph.record(image)? {
            Some(found) if found.object() == record.object() && found.identity() == record.identity() => {
                self.ceph.remove_record(image)
            }
            _ => Ok(()),
        }
    }

    /// Whether the image with this number has this name.
    fn is_at(&self, image: &RbdImage, id: u64) -> Result<bool> {
        Ok(self.ceph.examine(image)?.is_some_and(|found| found.number() == id))
    }

    fn rename_to(&self, from: &RbdImage, to: &RbdImage) -> Result<()> {
        match self.ceph.rename(from, to)? {
            true => Ok(()),
            false => Err(EngineError::Foreign(format!("the image {to} exists; choose another name"))),
        }
    }

    /// Returns the number of the image.
    pub(super) fn releasable(&self, object: &Object, path: &Path) -> Result<u64> {
        let (from, to) = (self.existing(object)?, self.here(path)?);
        if self.ceph.size(&to)?.is_some() {
            return Err(EngineError::Unsuitable(format!(
                "cannot release {object}: the image {to} exists; choose another name"
            )));
        }
        match self.ceph.examine(&from)? {
            Some(found) => Ok(found.number()),
            None => Err(EngineError::Missing(format!("the image of {object} does not exist: {from}"))),
        }
    }

    /// The record stays until the image has another name: with it, the image is never taken for another's.
    pub(super) fn move_out(&self, cleared: &Clearance, path: &Path, id: u64) -> Result<()> {
        self.check()?;
        let (object, from, to) = (cleared.object(), self.image(cleared.object()), self.here(path)?);
        if self.is_at(&from, id)? {
            self.refuse_another(object, cleared.identity())?;
            self.refuse_open(object)?;
            self.remove_abandoned(&from)?;
            let named = || self.rename_to(&from, &to);
            fail_point::effect(|| Some("engine.rbd.release".into()), requested, named)?;
        } else if !self.is_at(&to, id)? {
            return Err(EngineError::Missing(format!("the image of {object} is neither {from} nor {to}")));
        }
        self.ceph.remove_record(&to)?;
        audit::log_action("release", object, path, "it is no volume any more");
        Ok(())
    }
}
