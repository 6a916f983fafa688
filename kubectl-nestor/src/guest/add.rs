//! `kubectl nestor guest add`: applies the objects of a guest, waits for its token, and writes what its chart needs.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use crds::StorageBudget;
use crds::names::{ClusterId, credential_secret};
use guest_manifests::{CLAIMS, Guest, policy};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube_kit::quantity;
use process_kit::duration;
use tokio::time::{Instant, sleep};

use super::accounts::{self, Account};
use super::api::{self, HELM, MANAGED_BY};
use super::objects::{Limits, Present, Request, objects, reason_to_refuse};
use super::output::{self, Added, Change};
use super::{present, secret};
use crate::cli::{Connection, Format, SYSTEM_NAMESPACE};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::lists::read;
use crate::vm_api::{self, VmApi, is_kubevirt};

/// Interval between two reads of the Secret with the token.
const TOKEN_INTERVAL: Duration = Duration::from_secs(1);

/// What happens with the volumes of a guest that is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Deletion {
    /// They are kept.
    #[value(name = "Retain")]
    Retain,
    /// They are deleted with the guest's Cluster object.
    #[value(name = "Delete")]
    Delete,
}

/// Flags of `guest add`.
#[derive(Debug, Clone, Args)]
pub struct AddArgs {
    /// The guest: name of its ServiceAccount.
    #[arg(value_name = "NAME", value_parser = label)]
    pub name: String,
    /// Class of the management cluster that the guest may use: StorageClass, VolumeSnapshotClass or VolumeAttributesClass.
    /// Repeatable. [default for a new guest: all]
    #[arg(long = "class", value_name = "CLASS", value_delimiter = ',')]
    pub classes: Vec<String>,
    /// The guest may use all classes.
    #[arg(long, conflicts_with = "classes")]
    pub all_classes: bool,
    /// Maximum bytes of its volumes and snapshots. The limits of a repetition replace the earlier ones.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub budget: Option<String>,
    /// Maximum number of its volumes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    pub budget_volumes: Option<i64>,
    /// Maximum number of its snapshots.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    pub budget_snapshots: Option<i64>,
    /// Volumes when the guest's Cluster object is deleted, for the values of nestor-guest.
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = Deletion::Retain)]
    pub deletion: Deletion,
    /// Name of the guest's Cluster object. [default for a new guest: NAME]
    #[arg(long, value_name = "NAME", value_parser = subdomain)]
    pub cluster_object: Option<String>,
    /// API of the guest's VMs, as in gc-csi's flag --vm-api. With kubevirt, the account gets rights on VMs of KubeVirt, and
    /// admission policies that restrict them.
    #[arg(long, value_name = "API", value_enum, default_value_t = VmApi::Auto)]
    pub vm_api: VmApi,
    /// The namespace may have other guests.
    #[arg(long)]
    pub shared_namespace: bool,
    /// Address of the management API server, as the guest reaches it. [default: that of the kubeconfig]
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// Namespace of mgmt-csi in the management cluster.
    #[arg(long, value_name = "NAMESPACE", default_value = SYSTEM_NAMESPACE, value_parser = label)]
    pub system_namespace: String,
    /// Secret with the token in the guest.
    #[arg(long, value_name = "NAME", default_value = "management")]
    pub secret: String,
    /// Namespace of that Secret, and of nestor-guest.
    #[arg(long, value_name = "NAMESPACE", default_value = SYSTEM_NAMESPACE)]
    pub secret_namespace: String,
    /// Time limit for the token, which mgmt-csi creates.
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration::parse_timeout)]
    pub timeout: Duration,
    /// Folder for NAME-guest-values.yaml and NAME-management-secret.yaml.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Print the objects of the management cluster, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Output format. With yaml or json, no files are written.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

impl AddArgs {
    fn limits(&self) -> Option<Limits> {
        let (volumes, snapshots) = (self.budget_volumes, self.budget_snapshots);
        Limits { bytes: self.budget.clone(), volumes, snapshots }.any()
    }
}

/// A name that is a DNS label.
fn label(text: &str) -> Result<String, String> {
    if is_label(text) {
        return Ok(text.to_owned());
    }
    Err("expected 1 to 63 lower-case letters, digits and '-', starting and ending with a letter or digit"
        .to_owned())
}

fn is_label(text: &str) -> bool {
    let is_edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=crds::names::MAX_LABEL).contains(&text.len())
        && text.starts_with(is_edge)
        && text.ends_with(is_edge)
        && text.chars().all(|c| is_edge(c) || c == '-')
}

/// A name that is a DNS subdomain: labels with dots.
fn subdomain(text: &str) -> Result<String, String> {
    if text.len() <= 253 && text.split('.').all(is_label) {
        return Ok(text.to_owned());
    }
    Err("expected at most 253 lower-case letters, digits, '-' and '.'".to_owned())
}

/// A quantity of bytes.
fn size(text: &str) -> Result<String, String> {
    let is_valid = quantity::value(&Quantity(text.to_owned())).is_some();
    is_valid.then(|| text.to_owned()).ok_or_else(|| "expected a quantity such as 500Gi".to_owned())
}

/// Runs `guest add`.
pub async fn run(clusters: &Clusters, flags: &Connection, args: &AddArgs) -> Result<(), Error> {
    let cluster = clusters.management_for("guest add")?;
    let request = plan(cluster, flags, args).await?;
    let objects = objects(&request)?;
    let existing = existing(cluster, &objects).await?;
    if args.dry_run {
        return output::print_manifests(args.output, &objects);
    }
    let changes = apply(cluster, &objects, &existing).await?;
    let guest = &request.manifests;
    let token = await_token(cluster, guest, args).await?;
    let ca = secret::ca(cluster, &guest.namespace).await?;
    let place = secret::Place { name: &args.secret, namespace: &args.secret_namespace };
    let added = Added {
        name: guest.account.clone(),
        namespace: guest.namespace.clone(),
        cluster_id: guest.cluster_id.clone(),
        changes,
        values: output::values(args, &request, &cluster.server),
        secret: secret::of_guest(&place, &token, &ca),
    };
    output::show(args, &added)
}

/// Reads what exists, and refuses what is not possible.
async fn plan(cluster: &Cluster, flags: &Connection, args: &AddArgs) -> Result<Request, Error> {
    let accounts = accounts::list(cluster).await?;
    let namespace = namespace(flags, args, &accounts)?;
    let manifests = manifests(cluster, flags, args, namespace, &accounts).await?;
    let limits = args.limits();
    let budgets = match limits {
        Some(_) => read::list(cluster, cluster.all::<StorageBudget>(), "StorageBudgets", None).await?,
        None => Vec::new(),
    };
    let classes = match args.classes.is_empty() {
        true => None,
        false => Some(present::classes(cluster).await?),
    };
    let has_namespace = present::is_own_namespace(cluster, &manifests.namespace).await?;
    let has_kubevirt = is_kubevirt(args.vm_api, vm_api::served(cluster).await?).map_err(Error::Refused)?;
    let request = Request { manifests, limits, has_namespace, has_kubevirt };
    let present = Present {
        accounts: &accounts,
        budgets: &budgets,
        classes: classes.as_deref(),
        may_share_namespace: args.shared_namespace,
    };
    reason_to_refuse(&request, &present).map_or(Ok(request), |why| Err(Error::Refused(why)))
}

/// The namespace: that of the flags, that of an account with this name, or one with the guest's name.
fn namespace(flags: &Connection, args: &AddArgs, accounts: &[Account]) -> Result<String, Error> {
    let known: Vec<&Account> = accounts.iter().filter(|account| account.name == args.name).collect();
    let namespace = match (&flags.management_namespace, &known[..]) {
        (Some(namespace), _) => namespace.clone(),
        (None, [account]) => account.namespace.clone(),
        (None, _) => format!("guest-{}", args.name),
    };
    let why = |error: String| {
        Error::Refused(format!("{namespace:?} can't be a namespace: {error}; set --namespace"))
    };
    label(&namespace).map_err(why)
}

/// The guest, with what exists of it where no flag says otherwise.
async fn manifests(
    cluster: &Cluster,
    flags: &Connection,
    args: &AddArgs,
    namespace: String,
    accounts: &[Account],
) -> Result<Guest, Error> {
    let is_self = |one: &&Account| one.name == args.name && one.namespace == namespace;
    let recorded = accounts.iter().find(is_self).map(|account| account.cluster_id.clone());
    let id = flags.cluster_id.clone().or(recorded).unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let id: ClusterId = id.parse().map_err(|invalid| Error::Refused(format!("--cluster-id: {invalid}")))?;
    let cluster_object = match &args.cluster_object {
        Some(name) => Some(name.clone()),
        None => present::cluster_object(cluster, &namespace, &args.name).await?,
    };
    let mut guest = Guest {
        namespace,
        account: args.name.clone(),
        cluster_object: cluster_object.unwrap_or_else(|| args.name.clone()),
        cluster_id: id.to_string(),
        classes: args.classes.clone(),
        takes_unlabelled_vms: false,
        system_namespace: args.system_namespace.clone(),
    };
    if guest.classes.is_empty() && !args.all_classes {
        let allowed =
            present::allowed_classes(cluster, &policy(CLAIMS, &guest.account, &guest.namespace)).await?;
        guest.classes = allowed.unwrap_or_default();
    }
    Ok(guest)
}

/// Each object as it exists, or None. Objects of a Helm release are refused.
async fn existing(cluster: &Cluster, objects: &[DynamicObject]) -> Result<Vec<Option<DynamicObject>>, Error> {
    let mut existing = Vec::new();
    for object in objects {
        let found = api::read(&cluster.client, object).await?;
        let manager = found.as_ref().and_then(|found| found.labels().get(MANAGED_BY));
        if manager.is_some_and(|manager| manager == HELM) {
            return Err(Error::Refused(format!(
                "{} belongs to a Helm release, which would change it back: edit `guests` in the values of nestor-management instead",
                api::title(object)
            )));
        }
        existing.push(found);
    }
    Ok(existing)
}

async fn apply(
    cluster: &Cluster,
    objects: &[DynamicObject],
    existing: &[Option<DynamicObject>],
) -> Result<Vec<Change>, Error> {
    let mut changes = Vec::new();
    for (object, earlier) in objects.iter().zip(existing) {
        let outcome = api::apply(&cluster.client, object, earlier.as_ref()).await?;
        changes.push(Change { object: api::title(object), outcome });
    }
    Ok(changes)
}

/// Waits until mgmt-csi has created the token.
async fn await_token(cluster: &Cluster, guest: &Guest, args: &AddArgs) -> Result<String, Error> {
    let deadline = Instant::now() + args.timeout;
    loop {
        if let Some(token) = secret::token(cluster, &guest.namespace, &guest.account).await? {
            return Ok(token);
        }
        if Instant::now() > deadline {
            return Err(no_token(guest, args.timeout));
        }
        sleep(TOKEN_INTERVAL).await;
    }
}

fn no_token(guest: &Guest, timeout: Duration) -> Error {
    let Guest { namespace, account, system_namespace: system, .. } = guest;
    Error::Refused(format!(
        "the objects of guest {account} are applied, but mgmt-csi has written no token to Secret {namespace}/{} within {}: check that \
         mgmt-csi runs in {system} (kubectl -n {system} rollout status deployment/mgmt-csi) and is started with \
         --guest-accounts={system}; its log names the account and the cause. Then run the command again",
        credential_secret(account),
        duration::show(timeout)
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::accounts::tests::account;
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: AddArgs,
    }

    fn parse(words: &str) -> Result<AddArgs, clap::Error> {
        Line::try_parse_from(std::iter::once("add").chain(words.split(' '))).map(|line| line.args)
    }

    #[test]
    fn flags_are_checked_before_anything_is_applied() {
        let args = parse("shop --class gold,silver --class iron --budget 500Gi --deletion Delete").unwrap();
        assert_eq!(args.classes, ["gold", "silver", "iron"]);
        assert_eq!(args.limits().unwrap().bytes.as_deref(), Some("500Gi"));
        assert_eq!(args.deletion, Deletion::Delete);
        assert_eq!(parse("shop").unwrap().limits(), None);
        for wrong in [
            "Shop",
            "shop.one",
            "shop --budget much",
            "shop --budget-volumes -1",
            "shop --class gold --all-classes",
            "shop --cluster-object a/b",
            "shop --deletion retain",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_namespace_is_that_of_the_flag_the_account_or_the_name() {
        let args = parse("shop").unwrap();
        let flags = |namespace: Option<&str>| Connection {
            management_namespace: namespace.map(str::to_owned),
            ..Connection::default()
        };
        let known = [account("shop", "tenant-shop", "1"), account("other", "guest-other", "2")];
        assert_eq!(namespace(&flags(None), &args, &[]).unwrap(), "guest-shop");
        assert_eq!(namespace(&flags(None), &args, &known).unwrap(), "tenant-shop");
        assert_eq!(namespace(&flags(Some("x")), &args, &known).unwrap(), "x");
        assert!(namespace(&flags(Some("X")), &args, &known).is_err());
    }
}
