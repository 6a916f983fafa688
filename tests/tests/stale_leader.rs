//! A new leader acts only on what the API server shows now.
