//! Configuration: the file that names the clusters, merged with the flags.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::cli::Connection;
use crate::error::Error;

/// How to reach one cluster.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Access {
    /// Kubeconfig; default: kubectl's own.
    pub kubeconfig: Option<PathBuf>,
    /// Context; default: the current one.
    pub context: Option<String>,
    /// Namespace; default: the one of the context.
    pub namespace: Option<String>,
}

impl Access {
    fn is_named(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }
}

/// Contents of the configuration file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct File {
    guest: Access,
    management: Access,
    cluster_id: Option<String>,
    volume_prefix: Option<String>,
}

/// Clusters to read, and the identity of the guest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// The guest cluster, if it is to be read.
    pub guest: Option<Access>,
    /// The management cluster, if it is to be read.
    pub management: Option<Access>,
    /// Cluster ID of the guest.
    pub cluster_id: Option<String>,
    /// Prefix of management claims.
    pub volume_prefix: String,
}

impl Config {
    /// Reads the configuration file and applies the flags.
    pub fn load(flags: &Connection) -> Result<Self, Error> {
        let file = match (&flags.config, default_path()) {
            (Some(path), _) => read(path)?,
            (None, Some(path)) if path.exists() => read(&path)?,
            _ => File::default(),
        };
        Ok(merge(flags.clone(), file))
    }
}

/// `$XDG_CONFIG_HOME/nestor/config.yaml`, or the same below `~/.config`.
fn default_path() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("nestor").join("config.yaml"))
}

fn read(path: &Path) -> Result<File, Error> {
    let fail = |reason: String| Error::Config { path: path.to_owned(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
    parse(&text).map_err(fail)
}

pub(crate) fn parse(text: &str) -> Result<File, String> {
    let is_empty = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
    if is_empty {
        Ok(File::default())
    } else {
        serde_saphyr::from_str(text).map_err(|error| error.to_string())
    }
}

/// A flag replaces its field. A context without a kubeconfig does not use the file's kubeconfig if the flag names one.
fn merge(flags: Connection, file: File) -> Config {
    let guest = Access {
        kubeconfig: flags.guest_kubeconfig.or(file.guest.kubeconfig),
        context: flags.guest_context.or(file.guest.context),
        namespace: flags.namespace.or(file.guest.namespace),
    };
    let management = Access {
        kubeconfig: flags.management_kubeconfig.or(file.management.kubeconfig),
        context: flags.management_context.or(file.management.context),
        namespace: flags.management_namespace.or(file.management.namespace),
    };
    let (has_guest, has_management) = (guest.is_named(), management.is_named());
    Config {
        // Without any configuration, kubectl's current context is the guest.
        guest: (has_guest || !has_management).then_some(guest),
        management: has_management.then_some(management),
        cluster_id: flags.cluster_id.or(file.cluster_id),
        volume_prefix: flags.volume_prefix.or(file.volume_prefix).unwrap_or_else(|| "pvc".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_configuration_the_current_context_is_the_guest() {
        let config = merge(Connection::default(), File::default());
        assert_eq!((config.guest, config.management), (Some(Access::default()), None));
        assert_eq!(config.volume_prefix, "pvc");
    }

    #[test]
    fn flags_override_the_file_and_one_cluster_is_enough() {
        let file = parse("management: {context: mgmt, namespace: guest-1}\nclusterId: abc").unwrap();
        let config = merge(Connection::default(), file.clone());
        assert_eq!(config.guest, None, "only the management cluster is configured");
        assert_eq!(config.cluster_id.as_deref(), Some("abc"));
        let flags = Connection {
            guest_context: Some("g".into()),
            management_namespace: Some("other".into()),
            ..Default::default()
        };
        let config = merge(flags, file);
        assert_eq!(config.guest.and_then(|guest| guest.context).as_deref(), Some("g"));
        let management = config.management.unwrap();
        assert_eq!(
            (management.context.as_deref(), management.namespace.as_deref()),
            (Some("mgmt"), Some("other"))
        );
    }

    #[test]
    fn an_empty_file_is_valid_and_an_unknown_field_is_not() {
        assert_eq!(parse("# nothing\n"), Ok(File::default()));
        assert!(parse("managers: {}").is_err());
    }
}
