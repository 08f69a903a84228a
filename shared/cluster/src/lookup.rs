//! Identity of the objects in a cache: namespace and name alone.

use kube::api::ObjectMeta;

/// Namespace and name by which a cache finds an object.
#[derive(Clone, Copy, Debug)]
pub struct LookupKey<'a> {
    /// Namespace, if the object has one.
    pub namespace: Option<&'a str>,
    /// Name; an API server always returns one.
    pub name: Option<&'a str>,
}

impl<'a> From<&'a ObjectMeta> for LookupKey<'a> {
    fn from(metadata: &'a ObjectMeta) -> Self {
        Self { namespace: metadata.namespace.as_deref(), name: metadata.name.as_deref() }
    }
}

/// Implements `Lookup` for the type in which a cache stores a resource, by its function `lookup_key`. Without uid and
/// resourceVersion, which a cache would store once more with each key.
#[macro_export]
macro_rules! lookup_by_key {
    ($stored:ty as $resource:ty) => {
        impl ::kube::runtime::reflector::Lookup for $stored {
            type DynamicType = ();

            fn kind((): &()) -> ::std::borrow::Cow<'_, str> {
                <$resource as ::kube::Resource>::kind(&())
            }

            fn group((): &()) -> ::std::borrow::Cow<'_, str> {
                <$resource as ::kube::Resource>::group(&())
            }

            fn version((): &()) -> ::std::borrow::Cow<'_, str> {
                <$resource as ::kube::Resource>::version(&())
            }

            fn plural((): &()) -> ::std::borrow::Cow<'_, str> {
                <$resource as ::kube::Resource>::plural(&())
            }

            fn name(&self) -> Option<::std::borrow::Cow<'_, str>> {
                self.lookup_key().name.map(Into::into)
            }

            fn namespace(&self) -> Option<::std::borrow::Cow<'_, str>> {
                self.lookup_key().namespace.map(Into::into)
            }

            fn resource_version(&self) -> Option<::std::borrow::Cow<'_, str>> {
                None
            }

            fn uid(&self) -> Option<::std::borrow::Cow<'_, str>> {
                None
            }
        }
    };
}
