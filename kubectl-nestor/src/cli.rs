//! Command line: flags and subcommands.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use process_kit::duration;

use crate::guest::GuestCommand;
use crate::migrate::MigrateArgs;
use crate::subject::Subject;

/// Follows Nestor's volumes through the guest and the management cluster, shares them, manages guests, and checks an
/// installation.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-nestor",
    bin_name = "kubectl nestor",
    version,
    after_help = "Exit codes: 0 healthy, 1 stuck or with findings, 2 wrong usage or no connection."
)]
pub struct Cli {
    /// Clusters to read.
    #[command(flatten)]
    pub connection: Connection,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Which clusters to read, and how. Flags override the configuration file.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Clusters")]
pub struct Connection {
    /// Kubeconfig of the guest cluster. Default without any flag or configuration: kubectl's own.
    #[arg(long, global = true, value_name = "FILE")]
    pub guest_kubeconfig: Option<PathBuf>,
    /// Context of the guest cluster.
    #[arg(long, global = true, value_name = "NAME")]
    pub guest_context: Option<String>,
    /// Kubeconfig of the management cluster.
    #[arg(long, global = true, value_name = "FILE")]
    pub management_kubeconfig: Option<PathBuf>,
    /// Context of the management cluster.
    #[arg(long, global = true, value_name = "NAME")]
    pub management_context: Option<String>,
    /// Namespace of the guest in the management cluster. Default: the namespace of the context.
    #[arg(long, global = true, value_name = "NAMESPACE")]
    pub management_namespace: Option<String>,
    /// Cluster ID of the guest. Default: the UID of its namespace kube-system.
    #[arg(long, global = true, value_name = "ID")]
    pub cluster_id: Option<String>,
    /// Prefix of management claims, as in gc-csi's flag --volume-prefix. Default: pvc.
    #[arg(long, global = true, value_name = "PREFIX")]
    pub volume_prefix: Option<String>,
    /// Configuration file. Default: $XDG_CONFIG_HOME/nestor/config.yaml, if it exists.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Namespace of the claim or pod. Default: the namespace of the context.
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Follows one volume through both clusters, and says where and why it is stuck.
    Trace(TraceArgs),
    /// Lists the guest's volumes with their management claims.
    Volumes(ListArgs),
    /// Lists the guest's VirtualMachines and the number of their disks.
    Vms(ListArgs),
    /// Lists VolumeAttachments (nestor.dev) of the guest's namespace.
    Attachments(ListArgs),
    /// Lists the free capacity per class and zone that mgmt-csi publishes.
    Pools(PoolsArgs),
    /// Lists what each guest uses of the storage infra, and what its StorageBudget allows.
    Usage(ListArgs),
    /// Lists objects without a counterpart in the other cluster. Removes nothing.
    #[command(
        after_help = "Reads the objects of both clusters only. `mgmt-csi orphans` also compares them with the storage \
                      infra (volumes, snapshots and attachments that no object names), and can remove orphans."
    )]
    Orphans(ListArgs),
    /// Shares the volume of a management claim with a guest.
    #[command(
        after_help = "Needs the rights of the platform team. If the guest has another management namespace, creates a \
                      PersistentVolume of the same volume and a claim there; else labels the PersistentVolume. Prints the \
                      PersistentVolume to create in the guest. A repetition changes only what differs."
    )]
    Share(ShareArgs),
    /// Ends what share began, unless the guest has the volume attached.
    Unshare(UnshareArgs),
    /// Checks the installation in each connected cluster.
    Check(CheckArgs),
    /// Manages guests in the management cluster.
    Guest {
        /// What to do.
        #[command(subcommand)]
        command: GuestCommand,
    },
    /// Takes over the volumes of kubevirt-csi, without copies and while pods use them.
    #[command(
        after_help = "Needs the rights of the platform team. The PersistentVolumes keep their driver's name, under which gc-csi \
                      serves them. An interrupted migration is continued by running the command again. With --revert, the \
                      volumes are those of kubevirt-csi again."
    )]
    MigrateKubevirt(MigrateArgs),
    /// Writes a support bundle (.tar.gz) without Secrets and credentials.
    Bundle(BundleArgs),
    /// Prints a shell completion script.
    Completion {
        /// Shell.
        shell: clap_complete::Shell,
    },
}

/// Flags of `trace`.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// Object: pvc/NAME, pod/NAME, pv/NAME or va/NAME.
    #[arg(value_name = "KIND/NAME")]
    pub subject: Subject,
    /// Print again on each change, until the volume is healthy.
    #[arg(short, long)]
    pub watch: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
    /// With --watch, stop after this time.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, requires = "watch")]
    pub timeout: Option<Duration>,
}

/// Flags of lists.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Flags of `share`.
#[derive(Debug, Clone, Args)]
pub struct ShareArgs {
    /// Management claim. Its namespace is that of --management-namespace, --namespace or the context.
    #[arg(value_name = "CLAIM")]
    pub claim: String,
    /// The guest: its cluster ID, or the name of its ServiceAccount.
    #[arg(long, value_name = "GUEST")]
    pub with: String,
    /// The guest may only read: the disk is plugged read-only.
    #[arg(long)]
    pub read_only: bool,
    /// Management namespace of the guest. Default: that of its ServiceAccount or of its VirtualMachines.
    #[arg(long, value_name = "NAMESPACE")]
    pub to_namespace: Option<String>,
    /// Name of the claim to create there. Default: share-HASH.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Print the objects of the management cluster, and create nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Flags of `unshare`.
#[derive(Debug, Clone, Args)]
pub struct UnshareArgs {
    /// Management claim. Its namespace is that of --management-namespace, --namespace or the context.
    #[arg(value_name = "CLAIM")]
    pub claim: String,
    /// The guest: its cluster ID, or the name of its ServiceAccount.
    #[arg(long, value_name = "GUEST")]
    pub with: String,
    /// Management namespace of the guest. Default: that of its ServiceAccount or of its VirtualMachines.
    #[arg(long, value_name = "NAMESPACE")]
    pub to_namespace: Option<String>,
}

/// Flags of `pools`.
#[derive(Debug, Clone, Args)]
pub struct PoolsArgs {
    /// List the pools themselves, from their StoragePools, instead of the capacity for each class and zone.
    #[arg(long)]
    pub by_pool: bool,
    /// Namespace of mgmt-csi in the management cluster, where it publishes the capacity.
    #[arg(long, value_name = "NAMESPACE", default_value = SYSTEM_NAMESPACE)]
    pub system_namespace: String,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Namespace of Nestor's components in the management cluster, as the chart proposes it.
pub const SYSTEM_NAMESPACE: &str = "nestor-system";

/// Flags of `check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Flags of `bundle`.
#[derive(Debug, Clone, Args)]
pub struct BundleArgs {
    /// File to write. Default: nestor-bundle-TIME.tar.gz in the current directory.
    #[arg(short = 'f', long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Number of log lines per container.
    #[arg(long, value_name = "N", default_value_t = 5000)]
    pub log_lines: i64,
}

impl Command {
    /// Whether its object is in the management cluster.
    fn is_of_management(&self) -> bool {
        matches!(self, Self::Share(_) | Self::Unshare(_) | Self::Guest { .. })
    }
}

impl Cli {
    /// The connection, with --namespace as the management namespace for a command about an object there.
    pub fn connection(&self) -> Connection {
        let mut connection = self.connection.clone();
        if self.command.is_of_management() {
            let namespace = connection.namespace.take();
            connection.management_namespace = connection.management_namespace.or(namespace);
        }
        connection
    }
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    Text,
    /// Text with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        let cli =
            Cli::try_parse_from(["kubectl-nestor", "trace", "pvc/data", "-n", "shop", "-o", "json"]).unwrap();
        assert_eq!(cli.connection.namespace.as_deref(), Some("shop"));
        let Command::Trace(args) = cli.command else { panic!("not a trace") };
        assert_eq!((args.output, args.subject.to_string()), (Format::Json, "pvc/data".to_owned()));
        assert!(Cli::try_parse_from(["kubectl-nestor", "trace", "job/data"]).is_err());
        assert!(Cli::try_parse_from(["kubectl-nestor", "trace", "pvc/a", "--timeout", "1m"]).is_err());
    }

    #[test]
    fn the_namespace_of_a_share_or_guest_is_one_of_the_management_cluster() {
        let namespaces = |words: &str| {
            let cli = Cli::try_parse_from(words.split(' ')).unwrap();
            let connection = cli.connection();
            (connection.namespace, connection.management_namespace)
        };
        let (guest, management) = namespaces("kubectl-nestor share data --with g2 -n guest-1");
        assert_eq!((guest, management.as_deref()), (None, Some("guest-1")));
        let (guest, management) =
            namespaces("kubectl-nestor unshare data --with g2 --management-namespace m -n guest-1");
        assert_eq!((guest, management.as_deref()), (None, Some("m")));
        let (guest, management) = namespaces("kubectl-nestor guest remove shop -n guest-1");
        assert_eq!((guest, management.as_deref()), (None, Some("guest-1")));
        let (guest, management) = namespaces("kubectl-nestor trace pvc/data -n shop");
        assert_eq!((guest.as_deref(), management), (Some("shop"), None));
    }
}
