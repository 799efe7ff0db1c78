//! What becomes of a transactional function.
//!
//! ```text
//! async fn place(tx: &mut Tx<Db>, order: Order) -> Result<(Id, Message), E> { body }
//! ```
//! becomes
//! ```text
//! async fn place<'tx>(tx: impl OutboxOrTx<'tx, Db>, order: Order) -> Result<Id, E> {
//!     let call = Call::begin(tx).await?;                           // opens or joins
//!     let outcome: Result<(Id, Message), E> = async move { let tx = call.tx(); body }.await;
//!     call.end(outcome).await                                      // publishes, commits or marks
//! }
//! ```

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{
    Error, FnArg, GenericArgument, GenericParam, Ident, ItemFn, Lifetime, Pat, PatType, PathArguments, Result, ReturnType,
    Signature, Type, TypeReference, parse_quote, parse_quote_spanned,
};

/// Where the generated code finds what it needs.
fn library() -> TokenStream {
    quote!(::posthouse::transactional)
}

pub(crate) fn transactional(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    if !arguments.is_empty() {
        return Err(Error::new_spanned(arguments, "#[posthouse::transactional] takes no arguments"));
    }
    let mut function: ItemFn = syn::parse2(item).map_err(|e| {
        let why = "#[posthouse::transactional] goes on an async function with a body; \
                   a method that a trait declares can't be transactional, but can call a function that is";
        Error::new(e.span(), why)
    })?;
    let sig = &mut function.sig;
    if sig.asyncness.is_none() {
        return Err(Error::new_spanned(sig.fn_token, "a transactional function is `async`: it begins and commits a transaction"));
    }
    let returned = returned(sig)?;
    let Argument { position, argument, reference } = first_argument(sig)?;

    let library = library();
    let span = reference.elem.span();
    let tx_type = &reference.elem;
    let database = database(tx_type)?;
    let lifetime = reference.lifetime.clone().unwrap_or_else(|| {
        let own = Lifetime::new("'tx", Span::mixed_site());
        sig.generics.params.insert(0, GenericParam::Lifetime(syn::LifetimeParam::new(own.clone())));
        own
    });
    // Named as in the source where it has a name, for the documentation.
    let outer = match &*argument.pat {
        Pat::Ident(named) => named.ident.clone(),
        _ => Ident::new("tx", Span::mixed_site()),
    };
    sig.inputs[position] = parse_quote_spanned!(span=> #outer: impl #library::OutboxOrTx<#lifetime, #database>);
    let answer = answer(&returned, &library);
    sig.output = parse_quote_spanned!(returned.span()=> -> #answer);

    let (attrs, pat) = (&argument.attrs, &argument.pat);
    let name = sig.ident.to_string();
    let statements = &function.block.stmts;
    // Names of its own, which the body can't see.
    let names = Span::mixed_site();
    let (call, inner, outcome, error) =
        (Ident::new("call", names), Ident::new("inner", names), Ident::new("outcome", names), Ident::new("error", names));
    // With the span of the type, so that what is wrong with it is said once, where it stands.
    let span = returned.span();
    let its_outcome = quote_spanned!(span=> <#returned as #library::Outcome>);
    let refuse =
        quote_spanned!(span=> #its_outcome::answer(::core::result::Result::Err(#library::FromError::from_error(#error))));
    let said = quote!({
        #[allow(unused_imports)]
        use #library::{SaysNothing as _, SaysSo as _};
        (&#library::Said(#error)).said()
    });
    let end = quote_spanned!(span=> #call.end::<#returned>(#outcome, |#error: &#its_outcome::Error| #said).await);
    function.block = parse_quote!({
        let mut #call = match #library::Call::begin(
            #outer,
            ::core::concat!(::core::module_path!(), "::", #name),
        ).await {
            ::core::result::Result::Ok(#call) => #call,
            ::core::result::Result::Err(#error) => return #refuse,
        };
        let #inner = #call.tx();
        let #outcome = async move {
            if false {
                return #library::returns::<#returned>();
            }
            #(#attrs)*
            let #pat: &mut #tx_type = #inner;
            #(#statements)*
        }.await;
        #end
    });
    Ok(function.into_token_stream())
}

/// The type the function returns in the source.
fn returned(sig: &Signature) -> Result<Type> {
    const RESULT: &str = "a transactional function returns a `Result`: `Result<M, E>`, or `Result<(T, M), E>` and the caller gets `T`; \
                          `M` is what it publishes";
    match &sig.output {
        ReturnType::Default => Err(Error::new_spanned(&sig.ident, RESULT)),
        ReturnType::Type(_, ty) if has_impl(ty.to_token_stream()) => {
            Err(Error::new_spanned(ty, "a transactional function names the type it returns; `impl Trait` can't be used in it"))
        }
        ReturnType::Type(_, ty) => Ok((**ty).clone()),
    }
}

struct Argument {
    position: usize,
    argument: PatType,
    reference: TypeReference,
}

/// The first argument after `self`.
fn first_argument(sig: &Signature) -> Result<Argument> {
    const TX: &str = "the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`; \
                      its callers give it `&outbox` (opens and commits) or `&mut tx` (joins)";
    let first = sig.inputs.iter().enumerate().find_map(|(position, input)| match input {
        FnArg::Typed(argument) => Some((position, argument)),
        FnArg::Receiver(_) => None,
    });
    let Some((position, argument)) = first else {
        return Err(Error::new_spanned(&sig.ident, TX));
    };
    match &*argument.ty {
        Type::Reference(reference) if reference.mutability.is_some() => {
            Ok(Argument { position, argument: argument.clone(), reference: reference.clone() })
        }
        other => Err(Error::new_spanned(other, TX)),
    }
}

/// The database of a `Tx<DB>`; of an alias, what the compiler knows about it.
fn database(tx: &Type) -> Result<TokenStream> {
    if has_impl(tx.to_token_stream()) {
        return Err(Error::new_spanned(tx, "name the database: `async fn f<DB: Backend>(tx: &mut Tx<DB>, …)`"));
    }
    if let Some((name, generics)) = last_generics(tx)
        && name == "Tx"
        && let [GenericArgument::Type(database)] = generics.as_slice()
    {
        return Ok(database.to_token_stream());
    }
    let library = library();
    Ok(quote_spanned!(tx.span()=> <#tx as #library::IsTx>::Database))
}

/// What the caller gets: for the usual ways to write it readable in the documentation, else in the words of the trait.
fn answer(returned: &Type, library: &TokenStream) -> TokenStream {
    let readable = || {
        let (name, generics) = last_generics(returned)?;
        let [GenericArgument::Type(ok), ..] = generics.as_slice() else { return None };
        let value: Type = match ok {
            Type::Tuple(pair) if pair.elems.len() == 2 => pair.elems[0].clone(),
            Type::Array(_) => parse_quote!(()),
            other if ["Message", "Vec", "Option"].iter().any(|m| last_name(other).is_some_and(|name| name == m)) => {
                parse_quote!(())
            }
            _ => return None,
        };
        (name == "Result").then_some(())?;
        let mut returned = returned.clone();
        let Type::Path(path) = &mut returned else { return None };
        let PathArguments::AngleBracketed(generics) = &mut path.path.segments.last_mut()?.arguments else { return None };
        generics.args[0] = GenericArgument::Type(value);
        Some(returned.into_token_stream())
    };
    readable().unwrap_or_else(|| quote_spanned!(returned.span()=> <#returned as #library::Outcome>::Answer))
}

fn last_name(ty: &Type) -> Option<&Ident> {
    let Type::Path(path) = ty else { return None };
    path.path.segments.last().map(|segment| &segment.ident)
}

/// The last part of a path and its generic arguments.
fn last_generics(ty: &Type) -> Option<(&Ident, Vec<&GenericArgument>)> {
    let Type::Path(path) = ty else { return None };
    let segment = path.path.segments.last()?;
    let PathArguments::AngleBracketed(generics) = &segment.arguments else { return None };
    Some((&segment.ident, generics.args.iter().collect()))
}

/// Whether `impl` stands anywhere in it.
fn has_impl(tokens: TokenStream) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(word) => word == "impl",
        TokenTree::Group(group) => has_impl(group.stream()),
        _ => false,
    })
}
