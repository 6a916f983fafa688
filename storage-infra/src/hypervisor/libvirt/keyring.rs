//! Keys of Ceph clients, from their keyring files.

use std::fs;

use crate::hypervisor::CephClient;

/// The key of a client, in base64.
pub(super) fn key(client: &CephClient) -> Result<String, String> {
    let file = client.keyring.display();
    let text = fs::read_to_string(&client.keyring)
        .map_err(|error| format!("cannot read the keyring {file} of the Ceph client: {error}"))?;
    let key = find(&text, &client.user).map(str::to_owned);
    key.ok_or_else(|| format!("the keyring {file} has no key of client.{}", client.user))
}

/// The key in the section of a user.
fn find<'a>(keyring: &'a str, user: &str) -> Option<&'a str> {
    let section = format!("[client.{user}]");
    let lines = keyring.lines().map(str::trim).skip_while(|line| *line != section).skip(1);
    let mut own = lines.take_while(|line| !line.starts_with('['));
    own.find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "key").then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_that_of_the_user() {
        let keyring = "[client.a]\n\tkey = QUFB\n[client.b]\n\tkey = QkJC\n\tcaps mon = \"profile rbd\"\n";
        assert_eq!((find(keyring, "a"), find(keyring, "b")), (Some("QUFB"), Some("QkJC")));
        assert_eq!((find(keyring, "c"), find("[client.a]\n[client.b]\nkey = x", "a")), (None, None));
    }
}
