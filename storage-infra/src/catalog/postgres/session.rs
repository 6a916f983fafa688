//! A session with PostgreSQL: prepared queries, and the types of parameters and columns.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::error::Error as StdError;

use postgres::Client;
use postgres::types::private::BytesMut;
use postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::catalog::db::{Error, Result, Value};

/// A session. It is used by one thread.
pub(in crate::catalog) struct Session {
    client: RefCell<Client>,
    statements: RefCell<HashMap<String, postgres::Statement>>,
    /// Rows that were changed so far.
    changed: Cell<u64>,
}

/// A prepared query of a session.
pub(in crate::catalog) struct Prepared<'a> {
    session: &'a Session,
    statement: postgres::Statement,
}

impl Session {
    pub(super) fn new(client: Client) -> Self {
        Self { client: RefCell::new(client), statements: RefCell::default(), changed: Cell::new(0) }
    }

    /// Runs commands without parameters.
    pub(in crate::catalog) fn run(&self, commands: &str) -> Result<()> {
        Ok(self.client.borrow_mut().batch_execute(commands)?)
    }

    /// Rows that were changed so far.
    pub(super) fn changed(&self) -> u64 {
        self.changed.get()
    }

    /// Whether the connection has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.client.borrow().is_closed()
    }

    pub(in crate::catalog) fn prepare(&self, sql: &str) -> Result<Prepared<'_>> {
        if let Some(statement) = self.statements.borrow().get(sql) {
            return Ok(Prepared { session: self, statement: statement.clone() });
        }
        let statement = self.client.borrow_mut().prepare(&translate(sql))?;
        self.statements.borrow_mut().insert(sql.to_owned(), statement.clone());
        Ok(Prepared { session: self, statement })
    }

    /// The value of a column.
    pub(in crate::catalog) fn value(row: &postgres::Row, column: usize) -> Result<Value<'_>> {
        Ok(row.try_get::<_, Value<'_>>(column)?)
    }
}

impl Prepared<'_> {
    pub(in crate::catalog) fn execute(&self, values: &[Value<'_>]) -> Result<usize> {
        let changed = self.session.client.borrow_mut().execute(&self.statement, &parameters(values))?;
        self.session.changed.set(self.session.changed.get() + changed);
        usize::try_from(changed).map_err(|_| Error::TooLarge(changed))
    }

    pub(in crate::catalog) fn query(&self, values: &[Value<'_>]) -> Result<Vec<postgres::Row>> {
        Ok(self.session.client.borrow_mut().query(&self.statement, &parameters(values))?)
    }
}

fn parameters<'a>(values: &'a [Value<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    values.iter().map(|value| value as &(dyn ToSql + Sync)).collect()
}

impl ToSql for Value<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        match *self {
            Value::Null => Ok(IsNull::Yes),
            Value::Bool(value) if *ty == Type::BOOL => value.to_sql(ty, out),
            // SQLite has integers instead.
            Value::Integer(value) if *ty == Type::BOOL => (value != 0).to_sql(ty, out),
            Value::Integer(value) if *ty == Type::INT8 => value.to_sql(ty, out),
            Value::Integer(value) if *ty == Type::INT4 => i32::try_from(value)?.to_sql(ty, out),
            Value::Text(text) if is_text(ty) => text.to_sql(&Type::TEXT, out),
            Value::Bytes(bytes) if *ty == Type::BYTEA => bytes.to_sql(ty, out),
            _ => Err(format!("a parameter does not have the type {ty}").into()),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Value<'a> {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        match ty {
            &Type::BOOL => bool::from_sql(ty, raw).map(Value::Bool),
            &Type::INT8 => i64::from_sql(ty, raw).map(Value::Integer),
            &Type::INT4 => i32::from_sql(ty, raw).map(|value| Value::Integer(value.into())),
            &Type::BYTEA => Ok(Value::Bytes(raw)),
            text if is_text(text) => Ok(Value::Text(str::from_utf8(raw)?)),
            other => Err(format!("a column has the type {other}").into()),
        }
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        Ok(Value::Null)
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

fn is_text(ty: &Type) -> bool {
    [Type::TEXT, Type::VARCHAR, Type::NAME, Type::JSON].contains(ty)
}

/// Translates a query from SQLite's notation: parameters `?1`, and paths into JSON `->> '$.a.b'`.
fn translate(sql: &str) -> String {
    let mut parts = sql.split(" ->> '$.");
    let mut translated = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (path, rest) = part.split_once('\'').unwrap_or((part, ""));
        translated.push_str(&format!(" #>> '{{{}}}'{rest}", path.replace('.', ",")));
    }
    translated.replace('?', "$")
}

#[cfg(test)]
mod tests {
    use super::translate;

    #[test]
    fn parameters_and_paths_are_translated() {
        let sql = "SELECT spec ->> '$.a.b' FROM t WHERE spec ->> '$.c' = ?1 AND x = ?12";
        assert_eq!(translate(sql), "SELECT spec #>> '{a,b}' FROM t WHERE spec #>> '{c}' = $1 AND x = $12");
    }
}
