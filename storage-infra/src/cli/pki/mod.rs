//! `storage-infra pki`: a CA that is kept, and short-lived certificates of the server and its clients.
//!
//! | file in the directory | contents |
//! | --- | --- |
//! | `ca.crt` | the trusted CA certificates: the one that signs, and during a rotation also the previous one |
//! | `ca.key` | the key that signs |
//! | `NAME.crt`, `NAME.key` | a certificate and its key |

mod authority;
mod files;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use infra_api::{Account, Role};
use process_kit::duration;

use authority::{Authority, Subject};
use files::Directory;

/// Validity of a certificate, unless set by a flag.
const LIFETIME: &str = "30d";

/// Commands about certificates.
#[derive(Debug, Subcommand)]
pub(super) enum PkiCommand {
    /// Create a CA, and certificates of the server, of mgmt-csi (driver), of administrators (operator) and of the console
    /// (reader).
    Init(InitArgs),
    /// Issue or renew one certificate.
    Issue(IssueArgs),
    /// Replace the CA in two steps. The first creates a CA that signs from now on, beside the previous one, which stays
    /// trusted; the last, with --finish, removes the previous one.
    RotateCa(RotateArgs),
}

#[derive(Debug, Args)]
struct Location {
    /// Directory of the certificates.
    #[arg(long, value_name = "DIR", default_value = "/etc/nestor/pki")]
    dir: PathBuf,
    /// Key of the CA. [default: ca.key in --dir]
    #[arg(long, value_name = "FILE")]
    ca_key: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct InitArgs {
    #[command(flatten)]
    location: Location,
    /// Host name or IP address of the server. Repeatable.
    #[arg(long = "host", value_name = "NAME|IP", required = true)]
    hosts: Vec<String>,
    /// Validity of the certificates, such as 12h or 30d; the CA is valid for 10 years.
    #[arg(long, value_name = "DURATION", default_value = LIFETIME, value_parser = lifetime)]
    lifetime: Duration,
}

#[derive(Debug, Args)]
pub(super) struct IssueArgs {
    #[command(flatten)]
    location: Location,
    /// Role of the client, or server.
    #[arg(long, value_name = "ROLE", value_enum)]
    role: Holder,
    /// Common name of the certificate, and name of its files. [default: the role]
    #[arg(long, value_name = "NAME", value_parser = file_name)]
    name: Option<String>,
    /// Host name or IP address of the server. Repeatable. Required for the role server.
    #[arg(long = "host", value_name = "NAME|IP", required_if_eq("role", "server"))]
    hosts: Vec<String>,
    /// Account whose volumes and snapshots the client reaches: the cluster ID of a guest. Required for the role backup, refused
    /// for others.
    #[arg(long, value_name = "ACCOUNT", value_parser = account, required_if_eq("role", "backup"))]
    account: Option<Account>,
    /// Validity of the certificate, such as 12h or 30d.
    #[arg(long, value_name = "DURATION", default_value = LIFETIME, value_parser = lifetime)]
    lifetime: Duration,
    /// Replace existing files of this name.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
pub(super) struct RotateArgs {
    #[command(flatten)]
    location: Location,
    /// Remove the previous CA. Refused while a certificate in --dir is signed by it.
    #[arg(long)]
    finish: bool,
}

/// Who a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Holder {
    /// The server.
    Server,
    /// mgmt-csi.
    Driver,
    /// Administrators, and the commands of storage-infra.
    Operator,
    /// Clients that only read, such as nestor-console.
    Reader,
    /// Backups of one guest.
    Backup,
}

impl Holder {
    /// Its role; None for the server.
    fn role(self) -> Option<Role> {
        match self {
            Self::Server => None,
            Self::Driver => Some(Role::Driver),
            Self::Operator => Some(Role::Operator),
            Self::Reader => Some(Role::Reader),
            Self::Backup => Some(Role::Backup),
        }
    }

    fn name(self) -> &'static str {
        self.role().map_or("server", Role::name)
    }
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let lifetime = duration::parse(text)?;
    let longest = authority::CA_LIFETIME;
    match lifetime {
        short if short < Duration::from_secs(60) => Err("must be at least 1m".to_owned()),
        long if long > longest => Err(format!("must be at most {}", duration::show(longest))),
        lifetime => Ok(lifetime),
    }
}

fn account(text: &str) -> Result<Account, String> {
    let account = Account::new(text).map_err(|error| error.to_string())?;
    Some(account).filter(|account| !account.is_nobody()).ok_or_else(|| "must not be empty".to_owned())
}

fn file_name(text: &str) -> Result<String, String> {
    let is_legal = |c: char| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c);
    match !text.is_empty() && !text.starts_with('.') && text.chars().all(is_legal) && text != "ca" {
        true => Ok(text.to_owned()),
        false => Err("must have letters, digits, '-', '_' and '.', and not be ca".to_owned()),
    }
}

/// Runs a command.
pub(super) fn run(command: &PkiCommand) -> anyhow::Result<()> {
    match command {
        PkiCommand::Init(args) => init(args),
        PkiCommand::Issue(args) => issue(args),
        PkiCommand::RotateCa(args) => rotate(args),
    }
}

impl Location {
    fn open(&self) -> Directory<'_> {
        Directory::new(&self.dir, self.ca_key.as_deref())
    }
}

fn init(args: &InitArgs) -> anyhow::Result<()> {
    let directory = args.location.open();
    directory.create()?;
    let holders = [Holder::Server, Holder::Driver, Holder::Operator, Holder::Reader];
    directory.refuse_existing(holders.map(Holder::name))?;
    let authority = Authority::generate()?;
    directory.save_authority(&authority.key_pem(), &authority.certificate_pem()?)?;
    for holder in holders {
        let hosts = if holder == Holder::Server { &args.hosts[..] } else { &[] };
        let subject = Subject { name: common_name(holder), role: holder.role(), account: None, hosts };
        let (certificate, key) = authority.sign(&subject, args.lifetime)?;
        directory.save(holder.name(), &certificate, &key, false)?;
    }
    Ok(())
}

/// Common name of a certificate without a name of its own.
fn common_name(holder: Holder) -> &'static str {
    match holder {
        Holder::Server => "storage-infra",
        Holder::Driver => "mgmt-csi",
        Holder::Operator => "operator",
        Holder::Reader => "nestor-console",
        Holder::Backup => "backup",
    }
}

fn issue(args: &IssueArgs) -> anyhow::Result<()> {
    refuse_needless_account(args)?;
    let directory = args.location.open();
    let name = args.name.as_deref();
    let authority = Authority::load(&directory.ca_key()?, &directory.trusted()?)?;
    let subject = Subject {
        name: name.unwrap_or(common_name(args.role)),
        role: args.role.role(),
        account: args.account.as_ref(),
        hosts: &args.hosts,
    };
    let (certificate, key) = authority.sign(&subject, args.lifetime)?;
    directory.save(name.unwrap_or(args.role.name()), &certificate, &key, args.overwrite)
}

/// Refuses an account for a role that is for all accounts: its client would not be limited to it.
fn refuse_needless_account(args: &IssueArgs) -> anyhow::Result<()> {
    let is_of_one = args.role.role().is_some_and(Role::is_of_one_account);
    anyhow::ensure!(
        args.account.is_none() || is_of_one,
        "--account is not possible with --role {}, which is for all accounts; nothing was written: leave it out, or issue a \
         certificate of the role backup",
        args.role.name()
    );
    Ok(())
}

fn rotate(args: &RotateArgs) -> anyhow::Result<()> {
    let directory = args.location.open();
    let trusted = directory.trusted()?;
    match (args.finish, &trusted[..]) {
        (false, [previous]) => {
            let authority = Authority::generate()?;
            // The key first: without its certificate it signs nothing, and this command can be repeated.
            directory.replace_key(&authority.key_pem())?;
            directory.trust(&[authority.certificate_pem()?, previous.clone()])
        }
        (false, _) => anyhow::bail!(
            "{} has {} CA certificates, so a rotation has begun: complete it with --finish first",
            directory.ca_certificate().display(),
            trusted.len()
        ),
        (true, [signing, _, ..]) => {
            refuse_certificates_of_others(&directory, signing)?;
            directory.trust(std::slice::from_ref(signing))
        }
        (true, _) => Ok(()),
    }
}

fn refuse_certificates_of_others(directory: &Directory<'_>, signing: &str) -> anyhow::Result<()> {
    let of_others: Vec<PathBuf> = directory
        .certificates()?
        .into_iter()
        .filter(|(_, certificate)| !authority::is_signed_by(certificate, signing))
        .map(|(path, _)| path)
        .collect();
    let names: Vec<String> = of_others.iter().map(|path| Path::display(path).to_string()).collect();
    anyhow::ensure!(
        names.is_empty(),
        "the previous CA signed {}: issue them again with `storage-infra pki issue --overwrite`, install them, and repeat this \
         command; nothing was changed",
        names.join(", ")
    );
    Ok(())
}
