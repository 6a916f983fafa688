//! Where a pool of the engine `rbd` is, as one text: the pool's path in the API and in the catalog.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use uuid::Uuid;

use crate::hypervisor::{CephClient, RbdImage, RbdSource};

const PREFIX: &str = "rbd:";

/// A Ceph pool or a namespace of one, and how it is reached. Its text is
/// `rbd:POOL[/NAMESPACE]:id=USER:conf=FILE:keyring=FILE[:trash=SECONDS]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdLocation {
    /// Ceph pool.
    pub pool: String,
    /// RADOS namespace.
    pub namespace: Option<String>,
    /// cephx user, without `client.`.
    pub user: String,
    /// Configuration file, which names the monitors.
    pub conf: PathBuf,
    /// Keyring file of the user.
    pub keyring: PathBuf,
    /// How long deleted images stay in the trash.
    pub trash_seconds: u64,
}

impl RbdLocation {
    /// Where an image is, and how it is reached.
    pub fn of(source: &RbdSource) -> Self {
        let RbdSource { image: RbdImage { pool, namespace, .. }, client } = source.clone();
        let CephClient { conf, user, keyring, .. } = client;
        Self { pool, namespace, user, conf, keyring, trash_seconds: 0 }
    }

    /// The image of this name.
    pub fn image(&self, name: impl Into<String>) -> RbdImage {
        RbdImage { pool: self.pool.clone(), namespace: self.namespace.clone(), name: name.into() }
    }

    /// The Ceph pool, or the namespace of it.
    pub fn place(&self) -> String {
        let Self { pool, namespace, .. } = self;
        namespace.as_ref().map_or_else(|| pool.clone(), |namespace| format!("{pool}/{namespace}"))
    }

    /// The client that opens the images of the pool with this UUID.
    pub fn client(&self, pool: Uuid) -> CephClient {
        let (conf, user, keyring) = (self.conf.clone(), self.user.clone(), self.keyring.clone());
        CephClient { conf, user, keyring, secret: pool }
    }

    /// The name of an image, if it is here.
    pub fn name_of<'a>(&self, image: &'a RbdImage) -> Option<&'a str> {
        (image.pool == self.pool && image.namespace == self.namespace).then_some(image.name.as_str())
    }
}

/// The path of an image: `rbd:POOL[/NAMESPACE]/IMAGE`.
pub fn image_path(image: &RbdImage) -> PathBuf {
    format!("{PREFIX}{image}").into()
}

/// Parses the path of an image.
pub fn parse_image(path: &Path) -> Result<RbdImage, String> {
    let text = path.to_str().and_then(|path| path.strip_prefix(PREFIX)).unwrap_or_default();
    let image = RbdImage::parse(text).ok_or_else(|| {
        format!("the path {} must have the form rbd:POOL[/NAMESPACE]/IMAGE", path.display())
    })?;
    Ok(RbdImage {
        pool: plain_name("Ceph pool", &image.pool)?,
        namespace: image.namespace.map(|one| plain_name("namespace", &one)).transpose()?,
        name: plain_name("image", &image.name)?,
    })
}

/// Whether a path is in Ceph: the location of a pool of the engine `rbd`, or an image.
pub fn is_rbd(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.starts_with(PREFIX))
}

impl fmt::Display for RbdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.pool)?;
        if let Some(namespace) = &self.namespace {
            write!(f, "/{namespace}")?;
        }
        let (user, conf, keyring) = (&self.user, self.conf.display(), self.keyring.display());
        write!(f, ":id={user}:conf={conf}:keyring={keyring}")?;
        match self.trash_seconds {
            0 => Ok(()),
            seconds => write!(f, ":trash={seconds}"),
        }
    }
}

/// A name that needs no escape in any syntax of Ceph and libvirt, and is no option.
fn plain_name(what: &str, text: &str) -> Result<String, String> {
    let is_plain = |one: char| one.is_ascii_alphanumeric() || matches!(one, '.' | '_' | '-');
    match text.starts_with(|one: char| one.is_ascii_alphanumeric()) && text.chars().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "the {what} {text:?} must start with a letter or digit and have only letters, digits, '.', '_' and '-'"
        )),
    }
}

fn absolute(what: &str, text: &str) -> Result<PathBuf, String> {
    match text.starts_with('/') && !text.contains([':', '\n']) {
        true => Ok(text.into()),
        false => Err(format!("the {what} {text:?} must be an absolute path without a colon")),
    }
}

impl FromStr for RbdLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "must have the form rbd:POOL[/NAMESPACE]:id=USER:conf=FILE:keyring=FILE[:trash=SECONDS]";
        let rest = text.strip_prefix(PREFIX).ok_or_else(|| format!("the path {text:?} {form}"))?;
        let mut parts = rest.split(':');
        let place = parts.next().unwrap_or_default();
        let (pool, namespace) = place.split_once('/').map_or((place, None), |(pool, one)| (pool, Some(one)));
        let (mut user, mut conf, mut keyring, mut trash_seconds) = (None, None, None, 0);
        for part in parts {
            match part.split_once('=') {
                Some(("id", value)) => user = Some(plain_name("cephx user", value)?),
                Some(("conf", value)) => conf = Some(absolute("configuration file", value)?),
                Some(("keyring", value)) => keyring = Some(absolute("keyring file", value)?),
                Some(("trash", value)) => {
                    trash_seconds = value.parse().map_err(|_| {
                        format!("the time in the trash {value:?} must be a number of seconds")
                    })?;
                }
                _ => return Err(format!("the path {text:?} {form}")),
            }
        }
        let missing = |what: &str| format!("the path {text:?} has no {what}: it {form}");
        Ok(Self {
            pool: plain_name("Ceph pool", pool)?,
            namespace: namespace.map(|one| plain_name("namespace", one)).transpose()?,
            user: user.ok_or_else(|| missing("id"))?,
            conf: conf.ok_or_else(|| missing("conf"))?,
            keyring: keyring.ok_or_else(|| missing("keyring"))?,
            trash_seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_round_trips() {
        for text in [
            "rbd:vms:id=nestor:conf=/etc/ceph/ceph.conf:keyring=/etc/ceph/nestor.keyring",
            "rbd:vms/guest-a:id=nestor:conf=/c:keyring=/k:trash=86400",
        ] {
            assert_eq!(text.parse::<RbdLocation>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_location_that_is_incomplete_or_could_be_an_option_is_refused() {
        let why = |text: &str| text.parse::<RbdLocation>().unwrap_err();
        assert!(why("/srv/pool").contains("must have the form"));
        assert!(why("rbd:vms").contains("has no id"));
        assert!(why("rbd:-x:id=a:conf=/c:keyring=/k").contains("Ceph pool"));
        assert!(why("rbd:vms/a/b:id=a:conf=/c:keyring=/k").contains("namespace"));
        assert!(why("rbd:vms:id=a:conf=c:keyring=/k").contains("absolute"));
        assert!(why("rbd:vms:id=a:conf=/c:keyring=/k:trash=soon").contains("seconds"));
        assert!(why("rbd:vms:id=a:conf=/c:keyring=/k:other=1").contains("must have the form"));
    }

    #[test]
    fn the_path_of_an_image_round_trips_and_has_a_plain_name() {
        for text in ["rbd:vms/disk-1", "rbd:vms/a/disk.1"] {
            let image = parse_image(Path::new(text)).unwrap();
            assert_eq!(image_path(&image), Path::new(text));
        }
        let why = |text: &str| parse_image(Path::new(text)).unwrap_err();
        assert!(why("/srv/disk.img").contains("must have the form"));
        assert!(why("rbd:disk").contains("must have the form"));
        for text in ["rbd:vms/_snapshot.s", "rbd:vms/a/b/c", "rbd:vms/v@s", "rbd:vms/-v", "rbd:vms/"] {
            assert!(why(text).contains("the image"), "{text}");
        }
    }

    #[test]
    fn an_image_belongs_to_a_pool_by_pool_and_namespace() {
        let here: RbdLocation = "rbd:vms/a:id=n:conf=/c:keyring=/k".parse().unwrap();
        let name = |text: &str| here.name_of(&RbdImage::parse(text).unwrap()).map(str::to_owned);
        assert_eq!(name("vms/a/v").as_deref(), Some("v"));
        assert_eq!((name("vms/v"), name("vms/b/v"), name("other/a/v")), (None, None, None));
    }
}
