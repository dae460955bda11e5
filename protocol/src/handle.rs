//! Handles: tokens that only the host can resolve.

use crate::Wire;
use crate::codec::{DecodeError, Decoder, EncodeError, Encoder};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// Whether the handle names nothing.
            #[must_use]
            pub const fn is_null(self) -> bool {
                self.0 == 0
            }
        }

        impl Wire for $name {
            fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
                encoder.u64(self.0)
            }

            fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
                decoder.u64().map(Self)
            }
        }
    };
}

handle! {
    /// A buffer of the host; 0 names none.
    BufferHandle
}
handle! {
    /// A buffer type of the host; 0 names none.
    BufferTypeHandle
}
