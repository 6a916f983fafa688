//! gc-csi beside the rules of the upstream VM Operator.
