//! The account of QEMU: that of Debian's libvirt. Its daemon does not start without it, and the packages that the lab installs
//! do not create it.

use anyhow::Result;

use crate::process::{command, run};
use crate::ui::Ui;

/// Name of the account and of its group.
pub(crate) const ACCOUNT: &str = "libvirt-qemu";
/// The group that may use KVM, where it exists.
const KVM_GROUP: &str = "kvm";

/// Creates the account unless it exists; returns the group to run QEMU with.
pub(crate) async fn ensure(ui: &Ui) -> Result<&'static str> {
    let shell = "/usr/sbin/nologin";
    let group = ["groupadd", "--system", ACCOUNT];
    let user = ["useradd", "--system", "--no-create-home", "--gid", ACCOUNT, "--shell", shell, ACCOUNT];
    for (database, words) in [("group", &group[..]), ("passwd", &user[..])] {
        if is_missing(database, ACCOUNT).await {
            ui.line(format!("libvirt needs the account {ACCOUNT}; running: {}", words.join(" ")));
            run(&mut command(words[0], &words[1..])).await?;
        }
    }
    Ok(if is_missing("group", KVM_GROUP).await { ACCOUNT } else { KVM_GROUP })
}

async fn is_missing(database: &str, name: &str) -> bool {
    run(&mut command("getent", [database, name])).await.is_err()
}
