//! Long lists in pages. A page's token names the last entry that was given, so entries that come and go in between
//! neither shift the next page nor make its token invalid.

use crate::Status;

/// What every token begins with, so that other texts are told apart from it.
const TOKEN: &str = "after:";

/// One page of a list, and the token of the next one, or nothing at the list's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// Its entries.
    pub entries: Vec<T>,
    /// What to pass as starting_token for the next page.
    pub next: String,
}

/// The page of `entries` that follows `token`, in the order of their names. No limit when `most` is 0.
pub fn page<T>(
    mut entries: Vec<T>,
    name: impl Fn(&T) -> String,
    most: i32,
    token: &str,
) -> Result<Page<T>, Status> {
    let most = usize::try_from(most)
        .map_err(|_| Status::invalid_argument(format!("max_entries is negative: {most}")))?;
    let after = match token {
        "" => None,
        token => Some(token.strip_prefix(TOKEN).ok_or_else(|| {
            Status::aborted(format!("starting_token {token:?} is none of this driver's: list from the start"))
        })?),
    };
    entries.sort_by_cached_key(&name);
    entries.retain(|entry| after.is_none_or(|after| name(entry).as_str() > after));
    let mut next = String::new();
    if most > 0 && entries.len() > most {
        entries.truncate(most);
        next = entries.last().map(|last| format!("{TOKEN}{}", name(last))).unwrap_or_default();
    }
    Ok(Page { entries, next })
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn listed(entries: &[&str], most: i32, token: &str) -> Page<String> {
        let entries = entries.iter().map(|name| (*name).to_owned()).collect();
        page(entries, Clone::clone, most, token).unwrap()
    }

    #[test]
    fn pages_follow_each_other_though_entries_come_and_go() {
        let first = listed(&["c", "a", "b"], 2, "");
        assert_eq!(first.entries, ["a", "b"]);
        let second = listed(&["a", "c", "aa"], 2, &first.next);
        assert_eq!((second.entries, second.next.as_str()), (vec!["c".to_owned()], ""));
        assert_eq!(listed(&["b", "a"], 0, "").entries, ["a", "b"]);
        assert_eq!(listed(&["b", "a"], 2, "").next, "");
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let refused = |most, token| page(vec![String::new()], Clone::clone, most, token).unwrap_err().code();
        assert_eq!(refused(0, "invalid-token"), Code::Aborted);
        assert_eq!(refused(-1, ""), Code::InvalidArgument);
    }
}
