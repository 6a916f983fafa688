//! Codec of all CSI messages: protobuf, and a record of the objects that a request names in the span of its call.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};
use tracing::Span;

use crate::objects::NamedObjects;

/// Protobuf codec; the generated code refers to it.
#[derive(Debug, Clone)]
pub struct CsiCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CsiCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CsiCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = CsiDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        CsiDecoder(ProstCodec::<T, U>::default().decoder())
    }
}

/// Decoder that records what a request names. A driver decodes requests within the span of the call.
#[derive(Debug)]
pub struct CsiDecoder<U>(ProstDecoder<U>);

impl<U: Message + Default + 'static> Decoder for CsiDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = self.0.decode(buffer)?;
        let objects = message.as_ref().map(|message| NamedObjects::of(message));
        objects.unwrap_or_default().record(&Span::current());
        Ok(message)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}
