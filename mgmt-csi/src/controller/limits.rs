//! Mutable parameters, that is those of a VolumeAttributesClass, as the infra's QoS.

use std::collections::HashMap;

use crds::names::MANAGEMENT_DRIVER;
use infra_api::Qos;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_kit::quantity;
use tonic::Status;

const IOPS: &str = "iops";
const BYTES_PER_SECOND: &str = "bytesPerSecond";

/// The limits that the parameters say. What is absent or 0 is not limited.
pub(super) fn read(parameters: &HashMap<String, String>) -> Result<Qos, Status> {
    let mut qos = Qos::default();
    for (key, value) in parameters {
        let limit = match key.as_str() {
            IOPS => &mut qos.iops,
            BYTES_PER_SECOND => &mut qos.bytes_per_second,
            _ => {
                return Err(Status::invalid_argument(format!(
                    "mutable parameter {key:?} is not known: a VolumeAttributesClass of {MANAGEMENT_DRIVER} takes \
                     {IOPS:?} and {BYTES_PER_SECOND:?}"
                )));
            }
        };
        let number = quantity::value(&Quantity(value.clone())).ok_or_else(|| {
            Status::invalid_argument(format!(
                "mutable parameter {key:?} is {value:?}: give a number or a quantity such as 500 or 100Mi; 0 is no limit"
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
    fn limits_are_numbers_or_quantities_and_nothing_is_no_limit() {
        let qos = of(&[("iops", "500"), ("bytesPerSecond", "100Mi")]).unwrap();
        assert_eq!(qos, Qos { iops: Some(500), bytes_per_second: Some(100 << 20) });
        assert!(of(&[]).unwrap().is_unlimited());
        assert!(of(&[("iops", "0")]).unwrap().is_unlimited());
    }

    #[test]
    fn an_unknown_parameter_or_odd_value_is_refused_by_name() {
        for (key, value) in [("IOPS", "5"), ("iops", "-1"), ("iops", ""), ("bytesPerSecond", "fast")] {
            let status = of(&[(key, value)]).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(key), "{status}");
        }
    }
}
