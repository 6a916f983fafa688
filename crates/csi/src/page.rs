//! Pagination of lists. A page token contains the name of the last returned entry, so created and deleted entries neither
//! shift the next page nor invalidate the token.

use crate::Status;

/// Prefix of all tokens, for validation.
const TOKEN: &str = "after:";

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// Entries.
    pub entries: Vec<T>,
    /// starting_token of the next page, or empty for the last page.
    pub next: String,
}

/// Returns the page of `entries` after `token`, sorted by name. `most` 0 means no limit.
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
            Status::aborted(format!("starting_token {token:?} is invalid: list from the start"))
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
    fn pages_are_contiguous_although_entries_change() {
        let first = listed(&["c", "a", "b"], 2, "");
        assert_eq!(first.entries, ["a", "b"]);
        let second = listed(&["a", "c", "aa"], 2, &first.next);
        assert_eq!((second.entries, second.next.as_str()), (vec!["c".to_owned()], ""));
        assert_eq!(listed(&["b", "a"], 0, "").entries, ["a", "b"]);
        assert_eq!(listed(&["b", "a"], 2, "").next, "");
    }

    #[test]
    fn an_invalid_token_is_refused() {
        let refused = |most, token| page(vec![String::new()], Clone::clone, most, token).unwrap_err().code();
        assert_eq!(refused(0, "invalid-token"), Code::Aborted);
        assert_eq!(refused(-1, ""), Code::InvalidArgument);
    }
}
