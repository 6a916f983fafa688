//! Rights of nestor-console, of programs that check who reads their metrics, and of gc-csi-node.

use anyhow::{Context, Result};
use csi::proto::NodeGetInfoRequest;
use csi::proto::node_client::NodeClient;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use lab::cluster::objects::token;
use tests::accounts::{Account, Tier, Withheld};
use tests::program::{Running, binary};
use tests::{PATIENCE, Scenario, eventually, run_alone};

use super::shim::is_ready;
use super::table::{How, Other, is_silent, rights_of, steps};

async fn withheld(account: &Account, step: Other) -> Result<Withheld<'_>> {
    println!("{step:?}");
    Withheld::take(&[account], rights_of(How::Other(step))?, is_silent).await
}

async fn console(s: &Scenario, account: &Account, more: &[&str]) -> Result<Running> {
    let page = tokio::net::TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let kubeconfig = format!("--kubeconfig={}", account.kubeconfig.display());
    let listen = format!("--listen={page}");
    Running::start(&binary(&s.lab, "nestor-console"), &[&[&*kubeconfig, &*listen], more].concat()).await
}

async fn watches_of_the_console(s: &Scenario) -> Result<()> {
    let namespace = s.own_namespace().await?.name;
    let roles = [("ClusterRole nestor:nestor-console", "")];
    let account = Account::create(s, Tier::Management, &namespace, &roles).await?;
    let withheld = withheld(&account, Other::Console).await?;
    let console = console(s, &account, &[]).await?;
    withheld.until_refused(|| console.log(), || is_ready(&console)).await?;
    console.stop().await.map(drop)
}

async fn checks_of_readers(s: &Scenario) -> Result<()> {
    let namespace = s.own_namespace().await?.name;
    let roles = [("ClusterRole nestor:nestor-console", ""), ("ClusterRole nestor:metrics-auth", "")];
    let account = Account::create(s, Tier::Management, &namespace, &roles).await?;
    let roles = [("ClusterRole nestor:metrics-reader", "")];
    let reader = Account::create(s, Tier::Management, &namespace, &roles).await?;
    let token = token(&s.management, &namespace, reader.name()).await?;
    let withheld = withheld(&account, Other::Metrics).await?;
    let console = console(s, &account, &["--metrics-auth=token"]).await?;
    let reads = || async {
        Ok(match console.get_with_token("/metrics", &token).await {
            Ok((200, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        })
    };
    withheld.until_refused(|| console.log(), reads).await?;
    console.stop().await.map(drop)
}

async fn topology_of_a_node(s: &Scenario) -> Result<()> {
    let vm = s.simulated_node().await?;
    let nodes: Api<Node> = Api::all(s.guest.clone());
    eventually("the Node has a zone", PATIENCE, || async {
        let labels = nodes.get(&vm.name).await?.metadata.labels.unwrap_or_default();
        Ok(if labels.contains_key(crds::names::LABEL_ZONE) { Ok(()) } else { Err(format!("{labels:?}")) })
    })
    .await?;
    let roles = [("ClusterRole nestor:gc-csi-node", "")];
    let account = Account::create(s, Tier::Guest, &s.name, &roles).await?;
    let withheld = withheld(&account, Other::NodeInfo).await?;
    let folder = tempfile::tempdir()?;
    let inside = |file: &str| folder.path().join(file).display().to_string();
    std::fs::create_dir_all(folder.path().join("kubelet"))?;
    let words = [
        format!("--node-name={}", vm.name),
        format!("--kubelet-dir={}", inside("kubelet")),
        format!("--endpoint=unix://{}", inside("csi.sock")),
        format!("--registration-socket={}", inside("reg.sock")),
        format!("--guest-kubeconfig={}", account.kubeconfig.display()),
        "--topology".to_owned(),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let plugin = Running::start(&binary(&s.lab, "gc-csi-node"), &words).await?;
    let client = eventually("the node plugin serves", PATIENCE, || async {
        let connected = csi::client::connect(&folder.path().join("csi.sock")).await;
        Ok(connected.map(NodeClient::new).map_err(|error| format!("{error}; {}", plugin.log())))
    });
    let client = client.await?;
    let has_zone = || async {
        let mut request = tonic::Request::new(NodeGetInfoRequest {});
        request.set_timeout(std::time::Duration::from_secs(5));
        let answer = client.clone().node_get_info(request).await;
        Ok(answer.map(drop).map_err(|status| status.message().to_owned()))
    };
    withheld.until_refused(|| plugin.log(), has_zone).await?;
    plugin.stop().await.map(drop)
}

#[tokio::test]
async fn each_right_of_the_other_programs_is_needed() -> Result<()> {
    run_alone(|s| async move {
        for step in steps(|how| if let How::Other(step) = how { Some(step) } else { None }) {
            let outcome = match step {
                Other::Console => watches_of_the_console(&s).await,
                Other::Metrics => checks_of_readers(&s).await,
                Other::NodeInfo => topology_of_a_node(&s).await,
            };
            outcome.with_context(|| format!("{step:?}"))?;
        }
        Ok(())
    })
    .await
}
