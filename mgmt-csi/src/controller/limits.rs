//! QoS limits from mutable parameters, that is those of a VolumeAttributesClass.

use std::collections::HashMap;

use crds::names::MANAGEMENT_DRIVER;
use infra_api::Qos;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_kit::quantity;
use tonic::Status;

const IOPS: &str = "iops";
const BYTES_PER_SECOND: &str = "bytesPerSecond";

/// Default limits of new volumes, as flags.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct DefaultLimits {
    /// Maximum read and write operations per second of new volumes whose claim selects no VolumeAttributesClass. 0: no limit.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    default_iops: u64,
    /// Maximum bytes per second of new volumes whose claim selects no VolumeAttributesClass, as a quantity such as 100Mi. 0: no
    /// limit.
    #[arg(long, value_name = "QUANTITY", default_value = "0", value_parser = bytes)]
    default_bytes_per_second: u64,
}

fn bytes(text: &str) -> Result<u64, String> {
    quantity::value(&Quantity(text.to_owned())).ok_or_else(|| "must be a quantity such as 100Mi".to_owned())
}

impl From<DefaultLimits> for Qos {
    fn from(limits: DefaultLimits) -> Self {
        let limit = |number: u64| Some(number).filter(|number| *number > 0);
        Self { iops: limit(limits.default_iops), bytes_per_second: limit(limits.default_bytes_per_second) }
    }
}

/// Limits of a new volume: those of its parameters, or the default ones without any.
pub(super) fn or_default(parameters: &HashMap<String, String>, default: Qos) -> Result<Qos, Status> {
    if parameters.is_empty() { Ok(default) } else { read(parameters) }
}

/// Limits from the parameters. Absent or 0: unlimited.
pub(super) fn read(parameters: &HashMap<String, String>) -> Result<Qos, Status> {
    let mut qos = Qos::default();
    for (key, value) in parameters {
        let limit = match key.as_str() {
            IOPS => &mut qos.iops,
            BYTES_PER_SECOND => &mut qos.bytes_per_second,
            _ => {
                return Err(Status::invalid_argument(format!(
                    "unknown mutable parameter {key:?}: a VolumeAttributesClass of {MANAGEMENT_DRIVER} can have \
                     {IOPS:?} and {BYTES_PER_SECOND:?}"
                )));
            }
        };
        let number = quantity::value(&Quantity(value.clone())).ok_or_else(|| {
            Status::invalid_argument(format!(
                "invalid mutable parameter {key:?}: {value:?} is not a quantity such as 500 or 100Mi (0 means unlimited)"
            ))
        })?;
        *limit = Some(number).filter(|number| *number > 0);
    }
    Ok(qos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Qos, Status> {
        read(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn limits_are_quantities_and_absent_or_zero_is_unlimited() {
        let qos = of(&[("iops", "500"), ("bytesPerSecond", "100Mi")]).unwrap();
        assert_eq!(qos, Qos { iops: Some(500), bytes_per_second: Some(100 << 20) });
        assert!(of(&[]).unwrap().is_unlimited());
        assert!(of(&[("iops", "0")]).unwrap().is_unlimited());
    }

    #[test]
    fn a_volume_without_parameters_has_the_default_limits() {
        let default = Qos::from(DefaultLimits { default_iops: 100, default_bytes_per_second: 0 });
        assert_eq!(default, Qos { iops: Some(100), bytes_per_second: None });
        assert_eq!(or_default(&HashMap::new(), default).unwrap(), default);
        let own = [("bytesPerSecond".to_owned(), "1Mi".to_owned())].into();
        let expected = Qos { iops: None, bytes_per_second: Some(1 << 20) };
        assert_eq!(or_default(&own, default).unwrap(), expected);
    }

    #[test]
    fn an_error_names_the_unknown_or_invalid_parameter() {
        for (key, value) in [("IOPS", "5"), ("iops", "-1"), ("iops", ""), ("bytesPerSecond", "fast")] {
            let status = of(&[(key, value)]).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(key), "{status}");
        }
    }
}
