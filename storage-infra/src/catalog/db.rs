//! The connection below the tables: SQLite or PostgreSQL. The tables' queries are written once, in SQLite's notation; the
//! few differences in notation are translated here.

use std::fmt;

use rusqlite::types::{ToSqlOutput, ValueRef};

use super::postgres::session::{Prepared, Session};

/// A connection within a transaction.
#[derive(Clone, Copy)]
pub(super) enum Db<'a> {
    Sqlite(&'a rusqlite::Connection),
    Postgres(&'a Session),
}

/// Errors of a query.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("{}", describe(.0))]
    Postgres(#[from] postgres::Error),
    #[error("the query found no row")]
    NoRow,
    #[error("column {0} has a value of another type")]
    OtherType(usize),
    #[error("{0} does not fit into a column of 64-bit integers")]
    TooLarge(u64),
}

pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// What PostgreSQL says; the error itself only says which step failed.
pub(super) fn describe(error: &postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// A value of a column or a parameter.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Null,
    Bool(bool),
    Integer(i64),
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl fmt::Debug for Value<'_> {
    // Parameters may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
}

impl rusqlite::ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match *self {
            Value::Null => ValueRef::Null,
            Value::Bool(value) => ValueRef::Integer(value.into()),
            Value::Integer(value) => ValueRef::Integer(value),
            Value::Text(text) => ValueRef::Text(text.as_bytes()),
            Value::Bytes(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

/// What can be a parameter.
pub(super) trait ToValue {
    fn to_value(&self) -> Result<Value<'_>>;
}

impl<T: ToValue + ?Sized> ToValue for &T {
    fn to_value(&self) -> Result<Value<'_>> {
        (**self).to_value()
    }
}

impl<T: ToValue> ToValue for Option<T> {
    fn to_value(&self) -> Result<Value<'_>> {
        self.as_ref().map_or(Ok(Value::Null), T::to_value)
    }
}

impl ToValue for str {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(Value::Text(self))
    }
}

impl ToValue for String {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(Value::Text(self))
    }
}

impl ToValue for [u8] {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(Value::Bytes(self))
    }
}

impl ToValue for bool {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(Value::Bool(*self))
    }
}

impl ToValue for i64 {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(Value::Integer(*self))
    }
}

impl ToValue for u64 {
    fn to_value(&self) -> Result<Value<'_>> {
        i64::try_from(*self).map(Value::Integer).map_err(|_| Error::TooLarge(*self))
    }
}

impl ToValue for usize {
    fn to_value(&self) -> Result<Value<'_>> {
        let value = *self as u64;
        i64::try_from(value).map(Value::Integer).map_err(|_| Error::TooLarge(value))
    }
}

impl ToValue for Value<'_> {
    fn to_value(&self) -> Result<Value<'_>> {
        Ok(*self)
    }
}

/// The parameters of a query.
pub(super) trait Params {
    fn values(&self) -> Result<Vec<Value<'_>>>;
}

impl Params for [&dyn ToValue; 0] {
    fn values(&self) -> Result<Vec<Value<'_>>> {
        Ok(Vec::new())
    }
}

impl Params for &[&dyn ToValue] {
    fn values(&self) -> Result<Vec<Value<'_>>> {
        self.iter().map(ToValue::to_value).collect()
    }
}

impl Params for &[Value<'_>] {
    fn values(&self) -> Result<Vec<Value<'_>>> {
        Ok(self.to_vec())
    }
}

impl<T: ToValue> Params for [T; 1] {
    fn values(&self) -> Result<Vec<Value<'_>>> {
        self.iter().map(T::to_value).collect()
    }
}

impl<T: ToValue> Params for [T; 2] {
    fn values(&self) -> Result<Vec<Value<'_>>> {
        self.iter().map(T::to_value).collect()
    }
}

/// Parameters of different types.
macro_rules! params {
    ($($value:expr),* $(,)?) => {
        &[$(&$value as &dyn $crate::catalog::db::ToValue),*] as &[&dyn $crate::catalog::db::ToValue]
    };
}
pub(super) use params;

/// What a column can be read as.
pub(super) trait FromValue: Sized {
    fn from_value(value: Value<'_>) -> Option<Self>;
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            other => T::from_value(other).map(Some),
        }
    }
}

impl FromValue for String {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Text(text) => Some(text.to_owned()),
            _ => None,
        }
    }
}

impl FromValue for Vec<u8> {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bytes(bytes) => Some(bytes.to_owned()),
            _ => None,
        }
    }
}

impl FromValue for i64 {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Integer(value) => Some(value),
            _ => None,
        }
    }
}

impl FromValue for u64 {
    fn from_value(value: Value<'_>) -> Option<Self> {
        i64::from_value(value)?.try_into().ok()
    }
}

impl FromValue for usize {
    fn from_value(value: Value<'_>) -> Option<Self> {
        i64::from_value(value)?.try_into().ok()
    }
}

impl FromValue for bool {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(value),
            Value::Integer(value) => Some(value != 0),
            _ => None,
        }
    }
}

/// A row of a result.
pub(super) enum Row<'a> {
    Sqlite(&'a rusqlite::Row<'a>),
    Postgres(&'a postgres::Row),
}

impl Row<'_> {
    /// Reads a column.
    pub(super) fn get<T: FromValue>(&self, column: usize) -> Result<T> {
        T::from_value(self.value(column)?).ok_or(Error::OtherType(column))
    }

    /// The value of a column.
    pub(super) fn value(&self, column: usize) -> Result<Value<'_>> {
        match self {
            Self::Postgres(row) => Session::value(row, column),
            Self::Sqlite(row) => Ok(match row.get_ref(column)? {
                ValueRef::Null => Value::Null,
                ValueRef::Integer(value) => Value::Integer(value),
                ValueRef::Text(text) => {
                    Value::Text(str::from_utf8(text).map_err(|_| Error::OtherType(column))?)
                }
                ValueRef::Blob(bytes) => Value::Bytes(bytes),
                ValueRef::Real(_) => return Err(Error::OtherType(column)),
            }),
        }
    }
}

/// A prepared query.
pub(super) enum Statement<'a> {
    Sqlite(rusqlite::CachedStatement<'a>),
    Postgres(Prepared<'a>),
}

impl<'a> Db<'a> {
    /// Prepares a query, once per connection and text.
    pub(super) fn prepare_cached(&self, sql: &str) -> Result<Statement<'a>> {
        Ok(match self {
            Self::Sqlite(connection) => Statement::Sqlite(connection.prepare_cached(sql)?),
            Self::Postgres(session) => Statement::Postgres(session.prepare(sql)?),
        })
    }
}

impl Statement<'_> {
    /// Runs a change; returns the number of rows that it is about.
    pub(super) fn execute(&mut self, parameters: impl Params) -> Result<usize> {
        let values = parameters.values()?;
        match self {
            Self::Sqlite(statement) => Ok(statement.execute(rusqlite::params_from_iter(values))?),
            Self::Postgres(prepared) => prepared.execute(&values),
        }
    }

    /// Whether a query finds a row.
    pub(super) fn exists(&mut self, parameters: impl Params) -> Result<bool> {
        let values = parameters.values()?;
        match self {
            Self::Sqlite(statement) => Ok(statement.exists(rusqlite::params_from_iter(values))?),
            Self::Postgres(prepared) => Ok(!prepared.query(&values)?.is_empty()),
        }
    }

    /// Reads the first row.
    pub(super) fn query_row<T>(
        &mut self,
        parameters: impl Params,
        read: impl FnOnce(&Row<'_>) -> Result<T>,
    ) -> Result<T> {
        let values = parameters.values()?;
        match self {
            Self::Sqlite(statement) => {
                let mut rows = statement.query(rusqlite::params_from_iter(values))?;
                read(&Row::Sqlite(rows.next()?.ok_or(Error::NoRow)?))
            }
            Self::Postgres(prepared) => {
                read(&Row::Postgres(prepared.query(&values)?.first().ok_or(Error::NoRow)?))
            }
        }
    }

    /// Reads all rows.
    pub(super) fn query_map<T>(
        &mut self,
        parameters: impl Params,
        mut read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<std::vec::IntoIter<Result<T>>> {
        let values = parameters.values()?;
        let mut found = Vec::new();
        match self {
            Self::Sqlite(statement) => {
                let mut rows = statement.query(rusqlite::params_from_iter(values))?;
                while let Some(row) = rows.next()? {
                    found.push(read(&Row::Sqlite(row)));
                }
            }
            Self::Postgres(prepared) => {
                found.extend(prepared.query(&values)?.iter().map(|row| read(&Row::Postgres(row))));
            }
        }
        Ok(found.into_iter())
    }
}

/// Turns the absence of a row into `None`.
pub(super) trait OptionalExtension<T> {
    fn optional(self) -> Result<Option<T>>;
}

impl<T> OptionalExtension<T> for Result<T> {
    fn optional(self) -> Result<Option<T>> {
        match self {
            Ok(value) => Ok(Some(value)),
            Err(Error::NoRow) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
