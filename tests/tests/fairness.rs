//! One guest's worst behaviour does not delay another guest.
