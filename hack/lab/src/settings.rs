//! Temporary flags of components, to measure the effect of a setting.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, Result};
use futures::future::try_join_all;

use crate::lab::Lab;
use crate::state::Component;

/// One flag of one component, written `COMPONENT:FLAG[=VALUE]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    component: String,
    flag: String,
    value: Option<String>,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || {
            format!(
                "{text:?} is not COMPONENT:FLAG or COMPONENT:FLAG=VALUE, as in g1-provisioner:kube-api-qps=5; \
                 `cargo lab status` shows the components"
            )
        };
        let (component, flag) = text.split_once(':').ok_or_else(form)?;
        let (flag, value) = match flag.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (flag, None),
        };
        let flag = flag.trim_start_matches('-');
        if component.is_empty() || flag.is_empty() {
            return Err(form());
        }
        Ok(Self { component: component.to_owned(), flag: flag.to_owned(), value })
    }
}

impl Setting {
    /// Whether it is one of this component.
    pub fn is_of(&self, component: &str) -> bool {
        self.component == component
    }

    /// The component and the flag, for names of files.
    pub fn label(&self) -> String {
        format!("{}-{}", self.component, self.flag)
    }

    /// Sets the flag in a command line, replacing any earlier value.
    fn put(&self, words: &mut Vec<String>) {
        let flag = format!("--{}", self.flag);
        let is_same = |word: &String| *word == flag || word.starts_with(&format!("{flag}="));
        words.retain(|word| !is_same(word));
        words.push(match &self.value {
            Some(value) => format!("{flag}={value}"),
            None => flag,
        });
    }
}

impl Lab {
    /// Runs `work` while components run with changed flags. Always restores the usual flags.
    pub async fn with_settings<T>(
        &self,
        settings: &[Setting],
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut changed: BTreeMap<String, Component> = BTreeMap::new();
        for Setting { component, .. } in settings {
            let known = self.run().state()?.components.remove(component).with_context(|| {
                format!(
                    "the lab has no component {component:?} to set flags of; `cargo lab status` shows the components"
                )
            })?;
            changed.insert(component.clone(), known);
        }
        for setting in settings {
            changed.entry(setting.component.clone()).and_modify(|other| setting.put(&mut other.argv));
        }
        self.with_components(changed, work).await
    }

    /// Runs `work` while components run with these command lines. Always restores the usual ones.
    pub(crate) async fn with_components<T>(
        &self,
        changed: BTreeMap<String, Component>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let usual = changed.keys().map(|name| Ok((name.clone(), self.component(name)?)));
        let usual: BTreeMap<String, Component> = usual.collect::<Result<_>>()?;
        let outcome = match self.run_all_as(changed).await {
            Ok(()) => work.await,
            Err(failed) => Err(failed),
        };
        let restored = self.run_all_as(usual).await;
        outcome.and_then(|value| restored.map(|()| value))
    }

    /// Restarts components with these command lines.
    async fn run_all_as(&self, components: BTreeMap<String, Component>) -> Result<()> {
        let restarts = components.into_iter().map(|(name, component)| self.run_as(name, component));
        try_join_all(restarts).await.map(drop)
    }

    async fn run_as(&self, name: String, component: Component) -> Result<()> {
        self.stop(&name).await?;
        self.run().record(&name, component)?;
        self.start(&name).await.with_context(|| format!("{name} does not start with the changed flags"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_replaces_its_earlier_value() {
        let mut words: Vec<String> =
            ["/bin/csi-provisioner", "--kube-api-qps=500", "--kube-api-burst=1000"].map(str::to_owned).into();
        let setting: Setting = "g1-provisioner:--kube-api-qps=5".parse().unwrap();
        setting.put(&mut words);
        assert_eq!(words, ["/bin/csi-provisioner", "--kube-api-burst=1000", "--kube-api-qps=5"]);
        "g1-provisioner:strict-topology".parse::<Setting>().unwrap().put(&mut words);
        assert_eq!(words.last().unwrap(), "--strict-topology");
        for bad in ["", "g1-provisioner", ":flag", "part:", "part:=5"] {
            assert!(bad.parse::<Setting>().is_err(), "{bad}");
        }
    }
}
